"""Several engines behind one port, on Ray Serve."""

from collections.abc import Callable

import torch
from fastapi import FastAPI
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig

MOST_ONGOING = 1024  # requests of a replica, whose engine queues them

# Requests with one value of the header x-session-id go to one replica, and find their prefixes cached there. Ray's
# router by prefix, PrefixCacheAffinityRouter, is part of ray[llm] and routes calls of its LLM deployments only.
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


def serve_replicas(build: Callable[[], FastAPI], replicas: int, host: str, port: int) -> None:
    """Serve applications, which `build` makes in the process of each replica, until the process is interrupted."""
    serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=host, port=port))
    deployment = serve.deployment(
        serve.ingress(build)(),
        name="treespec",
        num_replicas=replicas,
        max_ongoing_requests=MOST_ONGOING,
        ray_actor_options={"num_cpus": 0, "num_gpus": int(torch.cuda.is_available())},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    try:
        serve.run(deployment.bind(), blocking=True)
    finally:
        serve.shutdown()
