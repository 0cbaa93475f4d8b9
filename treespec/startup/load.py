"""Loads the decoders of an engine: native models, draft heads, and adapters around transformers models."""

import logging
from ctypes import CDLL
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from treespec.adapter.decoder import AdapterDecoder, open_adapter
from treespec.adapter.mtp import MtpDecoder, MtpHead, open_mtp
from treespec.adapter.source import Source
from treespec.adapter.trace import AdapterConfig
from treespec.cache.kv_cache import FeatureShape
from treespec.errors import ModelError
from treespec.models.adapter_slots import SlotLimits
from treespec.models.assistant import AssistantDecoder, AssistantHead, TritonAssistantDecoder, assistant_config
from treespec.models.attention import TritonAttention, make_attention
from treespec.models.block_draft import (
    BlockDraft,
    DFlashDraft,
    MarkovBias,
    ParallelDraft,
    ParallelEagle,
    StateProjection,
)
from treespec.models.compiled import CompiledDecoder
from treespec.models.decoder import Decoder
from treespec.models.feature_head import AnyLinear, Eagle3Head, EagleHead, FeatureHead, PredictorHead, TorchPairs
from treespec.models.head_vocabulary import HeadVocabulary
from treespec.models.layer import take_projection
from treespec.models.model_config import ModelConfig
from treespec.models.state_head import DepthHeads, MedusaHeads, MlpSpeculator, SpeculatorStep, StateHead
from treespec.models.triton_decoder import TritonDecoder
from treespec.startup import cost_measurement as costs
from treespec.startup.vocabularies import REDUCED, Draft, HeadLimit, fit_weights, kept_tokens, rows_of_head
from treespec_kernels.cpu.compiled_linear import CompiledLinear
from treespec_kernels.cpu.cpu_library import CompileError, find_compiler
from treespec_kernels.cpu.decoder_cpu import PairInputs
from treespec_kernels.cpu.decoder_library import DTYPES, build
from treespec_kernels.linear.linear import Linear, LinearImpl, onednn_available
from treespec_kernels.linear.quantized import BlockWeight, QuantizedWeight, dequantized
from treespec_kernels.tuning.tuned import KernelConfigs
from treespec_weights import load_weights, read_config
from treespec_weights.assistants import AssistantForm, load_assistant
from treespec_weights.block_drafts import BlockForm, load_block
from treespec_weights.blocks import Blocks, Weights
from treespec_weights.draft_tensors import DraftOptions
from treespec_weights.draft_vocabulary import read_draft_vocabulary
from treespec_weights.gguf.tensors import describe_storage
from treespec_weights.heads import DraftForm, is_reduced, load_head
from treespec_weights.load import UNQUANTISED
from treespec_weights.mtp import MtpForm, load_predictor, predictor_of
from treespec_weights.quantize import quantize
from treespec_weights.state_heads import StateForm, load_state_head
from treespec_weights.state_projection import StateSsmForm, load_state_projection
from treespec_weights.vocabularies import Connection, connect

logger = logging.getLogger("treespec")

_FACTORS = ("_scale", "_zero")  # suffixes of a quantised weight's other tensors
_ANY_HEAD = 16  # arbitrary head size for building the library; linear layers do not use it


@dataclass(frozen=True)
class HeadConfig:
    """Config of a draft head or block draft, and the target states that it reads."""

    form: DraftForm  # layout of the published folder
    # Config of its layers, with the target's vocabulary size; for a head without attention, the target's config without
    # layers
    decoder: ModelConfig | AdapterConfig
    layers: tuple[int, ...]  # target layers whose inputs it reads; see `HeadForm.read_layers`
    target_hidden: int  # the target's hidden size
    # int64, ascending, tokens whose rows of a full vocabulary head (or the target's) remain; None for all
    kept: np.ndarray | None = field(default=None, compare=False)

    @property
    def num_parameters(self) -> int:
        """Upper bound on the parameters of layers and projections, without embeddings."""
        decoder, shape = self.decoder, self.decoder.shape
        if isinstance(self.form, StateForm):
            inner, rows = self.form.inner_size or self.target_hidden, shape.vocab_size
            rows = rows if self.kept is None else len(self.kept)
            return self.form.depths * inner * (rows + max(self.form.num_layers, 1) * self.target_hidden)
        qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * shape.hidden_size
        num_layer_parameters = decoder.num_parameters if isinstance(decoder, ModelConfig) else shape.num_parameters()
        return num_layer_parameters + qkv + len(self.layers) * self.target_hidden * shape.hidden_size

    def cut(self, limit: HeadLimit | None, name: str, target: ModelConfig) -> "HeadConfig":
        """Reduce the vocabulary head to the tokens that `limit` keeps, which are the same for all heads of a target.

        Heads trained with fewer tokens, and heads that score groups of tokens, stay whole. Raises DraftError without a
        tokenizer to rank the tokens.
        """
        config = self.decoder
        assert isinstance(config, ModelConfig)
        if limit is None or not limit.applies_to(config) or is_reduced(self.form, target.shape.vocab_size):
            return self
        ranked = replace(config, folder=target.folder, eos_token_ids=())
        if (kept := kept_tokens(limit, name, target, ranked, Connection("same"))) is None:
            return self
        return replace(self, decoder=replace(config, head_rows=len(kept)), kept=kept)

    @property
    def shares_head(self) -> bool:
        """Whether the draft may use the target's vocabulary head."""
        return isinstance(self.form, MtpForm) or getattr(self.form, "kind", None) in ("eagle", "dflash")

    @classmethod
    def of(cls, form: DraftForm, target: ModelConfig | AdapterConfig, max_model_len: int | None) -> "HeadConfig":
        """Return the config of a head for a target."""
        layers = form.read_layers(target.shape.num_layers)
        if isinstance(form, StateForm):
            shape = replace(target.shape, num_layers=0)
            layerless = (
                replace(target, shape=shape, layers=())
                if isinstance(target, ModelConfig)
                else replace(target, shape=shape, masks=(), sinks=())
            )
            return cls(form, layerless, layers, shape.hidden_size)
        if isinstance(form, MtpForm):
            assert isinstance(target, ModelConfig), "`Loader.open_mtp` opens the layers that transformers' code runs"
            shape, rules = predictor_of(form.folder, target.shape, target.rules)
            kind = next(kind for kind in reversed(target.layers) if not kind.recurrent)
            kinds = (kind._replace(sparse=shape.experts is not None),)
            return cls(form, replace(target, shape=shape, rules=rules, layers=kinds), layers, shape.hidden_size)
        if isinstance(form, AssistantForm):
            return cls(form, assistant_config(form, target, max_model_len), layers, target.shape.hidden_size)
        if isinstance(form, StateSsmForm):
            decoder = ModelConfig.from_hf(form.folder, max_model_len)
        else:
            decoder = ModelConfig.from_raw(form.folder, form.config, form.rules, max_model_len)
        size = target.shape.vocab_size
        if isinstance(form, BlockForm) and form.kind == "pard":
            connection = connect(target.folder, size, form.folder, decoder.shape.vocab_size)
            if connection.kind in ("translated", "text"):
                raise ModelError(
                    f"{form.folder} is a PARD draft with other token ids than the target {target.folder}; use a draft "
                    "that was trained for this target"
                )
        decoder = replace(decoder, shape=replace(decoder.shape, vocab_size=size))
        return cls(form, decoder, layers, target.shape.hidden_size)

    def __str__(self) -> str:
        article = "an" if self.form.name.startswith(("EAGLE", "MLP", "MTP")) else "a"
        cut = "" if self.kept is None else f", {len(self.kept):,} of {self.decoder.shape.vocab_size:,} tokens"
        return f"{article} {self.form.name} that {self.form.describe(self.layers)}{cut}"


def libraries_folder() -> Path:
    """Return the cache folder of compiled C++ libraries. Raises OSError if there is no cache folder."""
    return costs.cache_folder() / "compiled"


@dataclass(frozen=True)
class Loader:
    """Loads the models of an engine."""

    device: torch.device  # device of the passes
    dtype: torch.dtype
    attention: str  # implementation of tree attention
    # implementation of native models' linear layers; "compiled" runs whole passes in C++
    linear: LinearImpl | Literal["compiled", "triton"]
    exact: bool  # as in `LLM`
    configs: KernelConfigs | None  # Triton's kernel configurations; None without Triton
    int8_drafts: bool = False  # quantise drafts while loading, and their activations; compiled passes only
    # quantise the target's activations to int8 before products with quantised weights; compiled passes only
    integer: bool = False
    adapters: SlotLimits | None = None  # limits of the target's LoRA adapters on Triton kernels; None without
    shared: Weights = field(default_factory=dict)  # rows of the target's head, until the first draft head takes them
    _scorers: list[Decoder] = field(default_factory=list)  # this draft head, whose vocabulary head the others use
    _modules: dict[Source, nn.Module] = field(default_factory=dict)
    _layers: dict[MtpForm, nn.Module] = field(default_factory=dict)

    def open(self, model: ModelConfig | Source) -> ModelConfig | AdapterConfig:
        """Return a model's config. A transformers model is loaded, because its config is traced."""
        if isinstance(model, ModelConfig):
            return model
        config, self._modules[model] = open_adapter(model, self.dtype, self.device, self.attention)
        return config

    def open_mtp(self, form: MtpForm, target: AdapterConfig) -> HeadConfig:
        """Load the MTP layer of a target that `open` loaded, and return its config as a draft head."""
        config, self._layers[form] = open_mtp(target, self._modules[target.source])
        return HeadConfig(form, config, form.read_layers(target.shape.num_layers), target.shape.hidden_size)

    def load(
        self,
        config: ModelConfig | AdapterConfig,  # result of `open`; its vocabulary size may be the target's
        vocab_size: int,  # vocabulary size in the checkpoint
        positions: int,  # maximum context length
        min_rows: int,  # smaller passes are padded to this number of rows
        quantization: str | None = None,  # quantisation to apply to unquantised weights
        draft: Draft | None = None,  # the model as a draft; None for the target
        shared: np.ndarray | None = None,  # tokens that draft heads score with the target's head; None for all
    ) -> Decoder:
        """Load a model's weights and return its decoder."""
        if isinstance(config, AdapterConfig):
            return self.adapt(config, vocab_size, positions, self.attention, min_rows, 1)
        size, stored = config.shape.vocab_size, replace(config.shape, vocab_size=vocab_size)
        library = self._library(config, quantization)
        blocks = self.linear == "compiled" and quantization is None
        if config.folder.is_file() and quantization is None:
            logger.info("%s", describe_storage(config.folder, self.dtype, blocks))
        weights = load_weights(config.folder, stored, config.rules, self.dtype, self.device, quantization, blocks)
        tokens = None
        if draft is not None and (vocab_size != size or draft.target_ids is not None or draft.kept is not None):
            tokens = fit_weights(weights, size, draft.target_ids, draft.kept)
        if shared is not None:
            self.shared.update(rows_of_head(weights, shared))
        decoder = self._make_decoder(config, weights, tokens, positions, draft is not None, min_rows, library)
        if draft is None and self.integer:
            decoder.quantization = f"{decoder.quantization}, int8 activations"
        return decoder

    def load_draft(self, draft: Draft, positions: int) -> Decoder:
        """Load a draft model; its rows are not padded, because a draft's bits do not affect the output tokens."""
        return self.load(draft.config, draft.vocab_size, positions, min_rows=2, draft=draft)

    def load_head(
        self, config: HeadConfig, target: Decoder, features: FeatureShape | None, positions: int, pool: Tensor
    ) -> FeatureHead | BlockDraft:
        """Load a draft head or a block draft.

        `features` are the target states stored for all heads; `pool` is the target's K/V.
        """
        columns = [] if features is None else [features.layers.index(layer) for layer in config.layers]
        if isinstance(config.form, BlockForm):
            return self._load_block(config, config.form, target, columns)
        if isinstance(config.form, AssistantForm):
            assert isinstance(config.decoder, ModelConfig)
            is_fast = self.device.type == "cpu" and onednn_available(self.dtype)
            impl: LinearImpl = "onednn" if is_fast else "torch"
            shape = config.decoder.shape
            loaded = load_assistant(config.form, shape, self._options(config))
            assert isinstance(target.config, ModelConfig)
            arguments = target.config, config.decoder, loaded.decoder
            assistant: AssistantDecoder | TritonAssistantDecoder
            if self.configs is None:
                assistant = AssistantDecoder(*arguments, impl)
            else:
                op = make_attention(self.attention, shape, self.dtype, self.device, self.configs)
                assistant = TritonAssistantDecoder(*arguments, op, self.configs, self.exact, positions)
            if config.kept is not None:
                assistant.head_vocabulary = HeadVocabulary(config.kept, shape.vocab_size, self.device)
            return AssistantHead(config.form, loaded, assistant, target, pool, columns, impl)
        if isinstance(config.form, MtpForm) and isinstance(config.decoder, ModelConfig):
            return self._load_predictor(config, config.form, target, columns, positions)
        if isinstance(config.form, MtpForm):
            assert isinstance(config.decoder, AdapterConfig)
            op = make_attention(self.attention, config.decoder.shape, self.dtype, self.device, self.configs)
            return MtpHead(MtpDecoder(config.decoder, self._layers[config.form], op, positions), target, columns)
        if isinstance(config.form, StateForm):
            return self._load_state_head(config, config.form, target, columns)
        if isinstance(config.form, StateSsmForm):
            return self._load_state_ssm(config, config.form, target, columns, positions)
        shape = config.decoder.shape
        weights, tokens = load_head(config.form, shape, len(config.layers), self._options(config))
        decoder, scorer = self._make_head_decoder(config, weights.decoder, tokens, positions, target)
        fc = self._linear(decoder, *weights.fc)
        if config.form.kind == "eagle":
            embed = (target.embed if weights.embed is None else weights.embed).to(self.dtype)
            return EagleHead(decoder, scorer, columns, embed, fc, self._linear(decoder, *weights.qkv))
        assert weights.embed_norm is not None and weights.feature_norm is not None
        norms, stream = (weights.embed_norm, weights.feature_norm), "feature"
        if config.form.residual_after_norm:
            stream = "normed feature"
        pairs = self._pairs(decoder, *weights.qkv, weights.embed, target, norms, stream)
        head = Eagle3Head(decoder, columns, fc, pairs, config.form.norm_output, weights.state_norms)
        if weights.mask_states is None:
            return head
        return ParallelEagle(head, config.form.block, config.form.mask_token, weights.mask_states)

    def _options(self, config: HeadConfig) -> DraftOptions:
        return DraftOptions(config.target_hidden, self.dtype, self.device, config.kept)

    def _make_head_decoder(
        self, head: HeadConfig, weights: Weights, tokens: np.ndarray | None, positions: int | None, target: Decoder
    ) -> tuple[Decoder, Decoder | None]:
        """Return the decoder of a head's layers, and the one whose vocabulary head it uses, None for its own.

        A head without one uses the target's, or, if that is reduced, the copy that the first such head took.
        """
        config, scorers = head.decoder, self._scorers if tokens is not None else [target]
        assert isinstance(config, ModelConfig)
        scorer = None if "lm_head" in weights or not scorers else scorers[0]
        takes_shared = "lm_head" not in weights and scorer is None
        if takes_shared:
            weights |= self.shared
            config = replace(config, logit_cap=target.config.logit_cap, quantization=target.config.quantization)
        decoder = self._make_decoder(config, weights, tokens, positions, library=self._library(config, None))
        if takes_shared:
            scorers.append(decoder)
        return decoder, scorer

    def forget_shared(self) -> None:
        """Drop the weights that draft heads share while they are loaded."""
        self.shared.clear()
        self._scorers.clear()

    def _load_predictor(
        self, head: HeadConfig, form: MtpForm, target: Decoder, columns: list[int], positions: int
    ) -> PredictorHead:
        config, blocks = head.decoder, self.linear == "compiled"
        assert isinstance(config, ModelConfig)
        weights = load_predictor(form.folder, config.shape, config.rules, self.dtype, self.device, blocks)
        added = float(config.rules.norm == "rms_plus_one")  # `prepare` adds it to the other norms
        norms = weights.pop("embed_norm").float() + added, weights.pop("feature_norm").float() + added
        fc = take_projection(weights, "", ("fc",))
        # Placeholder, since embedding and head are the target's; compiled growth needs a multiple of 16 rows.
        weights["embed"] = torch.zeros(16, config.shape.hidden_size, dtype=self.dtype, device=self.device)
        decoder, scorer = self._make_head_decoder(head, weights, head.kept, positions, target)
        pairs = self._pairs(decoder, fc, None, None, target, norms, "product")
        return PredictorHead(decoder, scorer, columns, pairs, norm_output=True)

    def _load_state_ssm(
        self, head: HeadConfig, form: StateSsmForm, target: Decoder, columns: list[int], positions: int
    ) -> Eagle3Head:
        config = head.decoder
        assert isinstance(config, ModelConfig)
        hidden, size, rows = config.shape.hidden_size, config.shape.vocab_size, read_config(form.folder)["vocab_size"]
        projection = load_state_projection(form, hidden, head.target_hidden, self.dtype, self.device)
        ids = read_draft_vocabulary(form.folder, rows, size)
        decoder = self.load(config, rows, positions, 2, draft=Draft(form.name, config, REDUCED, rows, ids))
        norms = projection.enorm, projection.hnorm
        pairs = self._pairs(decoder, projection.eh_proj, None, decoder.embed, target, norms, "product")
        return Eagle3Head(decoder, columns, self._linear(decoder, projection.fc), pairs, norm_output=True)

    def _pairs(
        self,
        decoder: Decoder,  # the head's layers
        product: Any,  # weight of `PairInputs`; the next argument is its bias
        bias: Tensor | None,
        embed: Tensor | None,  # embedding; None for the target's
        target: Decoder,
        norms: tuple[Tensor, Tensor],
        stream: str,  # as in `PairInputs`
    ) -> TorchPairs | PairInputs:
        eps, blocks = decoder.config.norm_eps, target.embed_blocks if embed is None else None
        table: Tensor | BlockWeight
        if blocks is not None:
            table = BlockWeight(blocks.kind, blocks.rows, blocks.release)
        else:
            table = (target.embed if embed is None else embed).to(self.dtype)
        if isinstance(decoder, CompiledDecoder):
            weight_and_bias, num_threads = (self._fitted(product), bias), torch.get_num_threads()
            arguments = weight_and_bias, table, *norms, eps, stream, num_threads, self.int8_drafts
            return PairInputs(decoder.library, *arguments)
        assert isinstance(table, Tensor), "only compiled passes keep matrices in blocks"
        return TorchPairs(self._linear(decoder, product, bias), table, norms, eps, stream)

    def _load_block(self, config: HeadConfig, form: BlockForm, target: Decoder, columns: list[int]) -> BlockDraft:
        weights, tokens = load_block(form, config.decoder.shape, self._options(config))
        decoder, scorer = self._make_head_decoder(config, weights.decoder, tokens, None, target)
        embed = weights.embed
        if weights.mask is not None:
            return ParallelDraft(decoder, form.block, weights.mask * decoder.first_scale)
        assert weights.fc is not None and weights.state_norm is not None
        bias = None
        if weights.markov is not None:
            gate = None if weights.markov.gate is None else self._linear(decoder, *weights.markov.gate)
            bias = MarkovBias(weights.markov.embed, self._linear(decoder, weights.markov.out), gate)
        return DFlashDraft(
            decoder,
            scorer,
            (target.embed.to(self.dtype), target.embed_scale) if embed is None else (embed, 1.0),
            form.mask_token,
            form.block_size,
            form.predicts_next,
            StateProjection(columns, self._linear(decoder, weights.fc), weights.state_norm),
            bias,
        )

    def _load_state_head(self, config: HeadConfig, form: StateForm, target: Decoder, columns: list[int]) -> StateHead:
        size = target.vocab_size
        depths, tokens = load_state_head(form, size, self._options(config))
        vocabulary = None if tokens is None else HeadVocabulary(tokens, size, self.device)
        linears: dict[int, AnyLinear] = {}

        def linear(weight: Tensor | None, bias: Tensor | None = None) -> AnyLinear:
            assert weight is not None
            if id(weight) not in linears:  # depths may share weights
                linears[id(weight)] = self._linear(target, weight, bias)
            return linears[id(weight)]

        heads = DepthHeads(target, columns, [linear(depth.head) for depth in depths], vocabulary)
        if form.kind == "medusa":
            return MedusaHeads(heads, [[linear(*layer) for layer in depth.layers] for depth in depths])
        steps = [
            SpeculatorStep(depth.embed, linear(depth.project), depth.gain, depth.shift)
            for depth in depths
            if depth.embed is not None and depth.gain is not None and depth.shift is not None
        ]
        return MlpSpeculator(heads, steps, form.scale_input)

    def _fitted(self, weight: Any) -> Any:
        """Convert a draft head's projection to the format of its layers' matrices."""
        return QuantizedWeight(*quantize(weight, 8)) if self.int8_drafts and isinstance(weight, Tensor) else weight

    def _linear(self, decoder: Decoder, weight: Any, bias: Tensor | None = None) -> AnyLinear:
        """Return a linear layer of a draft outside the layers of `decoder`."""
        if isinstance(decoder, CompiledDecoder):
            sizes = self.dtype, torch.get_num_threads(), self.int8_drafts
            return CompiledLinear(decoder.library, self._fitted(weight), bias, *sizes)
        if isinstance(weight, QuantizedWeight):
            weight = dequantized(weight).to(self.dtype)
        return Linear(weight, bias, self._impl)

    @property
    def _impl(self) -> LinearImpl:
        """Implementation of uncompiled linear layers."""
        return "onednn" if self.linear == "onednn" else "torch"

    def _make_decoder(
        self,
        config: ModelConfig,
        weights: Weights,
        tokens: np.ndarray | None,  # tokens of a reduced head's rows; None for a full head
        positions: int | None,  # maximum context of a decoder for captured rounds; None for an eager decoder
        is_draft: bool = True,
        min_rows: int = 2,
        library: CDLL | None = None,
    ) -> Decoder:
        if is_draft and self.int8_drafts:
            try:
                quantize_matrices(weights)
            except ValueError as error:
                raise ModelError(f"{config.folder}: {error}; draft_quantization=None loads it as it is") from error
        decoder: Decoder
        if self.linear == "compiled":
            integer = self.int8_drafts if is_draft else self.integer
            decoder = CompiledDecoder(config, weights, libraries_folder(), integer)
        else:
            op = make_attention(self.attention, config.shape, self.dtype, self.device, self.configs)
            if self.configs is None or positions is None:
                decoder = Decoder(config, weights, op, self._impl, min_rows, library)
            else:
                assert isinstance(op, TritonAttention)
                adapters = None if is_draft else self.adapters
                decoder = TritonDecoder(config, weights, op, self.configs, self.exact, positions, adapters)
        if tokens is not None:
            decoder.head_vocabulary = HeadVocabulary(tokens, config.shape.vocab_size, self.device)
        return decoder

    def _library(self, config: ModelConfig, quantization: str | None) -> CDLL | None:
        """Return the library for an eager decoder's quantised layers, or None if unneeded or impossible to build."""
        eager, scheme = self.linear != "compiled" and self.configs is None, config.quantization
        if not eager or (quantization is None and (scheme is None or scheme.floating)):
            return None
        try:
            if self.device.type != "cpu" or self.dtype not in DTYPES:
                raise CompileError(f"there is no kernel for {self.dtype} on {self.device}")
            return build(find_compiler(), _ANY_HEAD, self.dtype, libraries_folder())
        except (CompileError, OSError) as error:
            logger.warning("quantised weights are held as %s, which saves no memory and no time: %s", self.dtype, error)
            return None

    def adapt(
        self, config: AdapterConfig, vocab_size: int, positions: int, attention: str, min_rows: int, multiple: int
    ) -> AdapterDecoder:
        """Return the decoder of a model for the adapter, which `open` loaded."""
        op = make_attention(attention, config.shape, self.dtype, self.device, self.configs)
        module = self._modules[config.source]
        return AdapterDecoder(config, module, op, positions, min_rows, multiple, vocab_size, self.exact)


def quantize_matrices(weights: Weights) -> None:
    """Quantise a draft's matrices and head to int8 with a scale per row, in place; skip quantised ones."""
    if not isinstance(weights["embed"], Blocks):
        weights.setdefault("lm_head", weights["embed"])
    names = [name for name in weights if name == "lm_head" or name.startswith("layers.")]
    for name in names:
        weight = weights[name]
        if isinstance(weight, Blocks) or name.endswith((*_FACTORS, *UNQUANTISED)):
            continue
        if weight.dim() == 2 and weight.is_floating_point():
            weights[name], weights[f"{name}_scale"], _ = quantize(weight, 8)
