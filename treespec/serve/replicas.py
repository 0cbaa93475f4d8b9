"""Several engines behind one port, on Ray Serve."""

from collections.abc import Callable

import torch
from fastapi import FastAPI
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig

MAX_ONGOING = 1024  # maximum ongoing requests of a replica; its engine queues them

# Requests with the same x-session-id header go to the same replica, which has their prefixes cached. Ray's prefix
# router, PrefixCacheAffinityRouter, is part of ray[llm] and routes only calls of its LLM deployments.
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


def serve_replicas(build: Callable[[], FastAPI], replicas: int, host: str, port: int) -> None:
    """Serve applications until interrupted; `build` creates one in the process of each replica."""
    serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=host, port=port))
    deployment = serve.deployment(
        serve.ingress(build)(),
        name="treespec",
        num_replicas=replicas,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": 0, "num_gpus": int(torch.cuda.is_available())},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    try:
        serve.run(deployment.bind(), blocking=True)
    finally:
        serve.shutdown()
