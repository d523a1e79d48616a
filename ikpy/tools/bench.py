"""Speed of prompt processing and token generation: how a test is measured."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import numpy as np

from ikpy.errors import IkpyError, UsageError
from ikpy.tools.bench_tests import BenchParams, BenchTest
from ikpy.tools.model_logs import model_description
from ikpy.vocab import keys

if TYPE_CHECKING:
    from ikpy.engine.memory import MemoryReport
    from ikpy.graph.placement import DeviceParams, PlacementParams

RANDOM_SEED = 1


@dataclass
class Result:
    """Times of one test and facts about its model."""

    test: BenchTest
    model_type: str
    model_size: int
    model_n_params: int
    test_time: str
    samples_ns: list[int] = field(default_factory=list)

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second of every repetition."""
        return [1e9 * self.test.counted_tokens / ns if ns else math.inf for ns in self.samples_ns]

    @property
    def avg_ns(self) -> int:
        return int(statistics.fmean(self.samples_ns))

    @property
    def stddev_ns(self) -> int:
        return int(sample_deviation(self.samples_ns))

    @property
    def avg_ts(self) -> float:
        return statistics.fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return sample_deviation(self.samples_ts)


def sample_deviation(values: Sequence[float]) -> float:
    """Standard deviation with divisor n-1; 0 for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


class NothingWrittenError(UsageError):
    """A test generates with a model that embeds texts: single tokens, each a text of its own, would be measured."""

    def __init__(self, model: str) -> None:
        super().__init__(f"'{model}' embeds texts and writes none: its prompts (-p) alone are measured")


class Engine:
    """What the benchmark needs of the engine; tests put another one in its place."""

    def __init__(self, params: BenchParams, log: Callable[[str], None] | None = None) -> None:
        """``log`` takes the lines of models and contexts."""
        self.params = params
        self.log = log

    def load(self, test: BenchTest) -> Any:
        """Load the model of a test."""
        from ikpy.engine.model import Model
        from ikpy.engine.params import ModelParams

        params = ModelParams(
            mla=test.values["mla_attn"],
            use_mmap=test.values["use_mmap"] and not self.params.use_thp,
            huge_pages=self.params.use_thp,
            fill=self.params.lazy_mode != "on",
            defer_experts=self.params.defer_experts,
            read_ahead=self.params.numa is None,
            repack=test.values["repack"],
            header_only=self.params.dry_run,
            placement=self.placement(test),
            devices=self.device_params(),
        )
        model = Model.load(test.model, params, log=self.log)
        model.gguf.wait_until_filled()
        return model

    def placement(self, test: BenchTest) -> PlacementParams:
        """Where the tensors of a test's model go."""
        from ikpy.graph.placement import PlacementParams

        values, rules = test.values, filter(None, self.params.override_tensor.split(";"))
        return PlacementParams(
            n_gpu_layers=values["n_gpu_layers"],
            split_mode=values["split_mode"],
            main_gpu=values["main_gpu"],
            tensor_split=values["tensor_split"],
            rules=tuple((rule.partition("=")[0], rule.partition("=")[2]) for rule in rules),
            n_cpu_moe=self.params.n_cpu_moe,
            kv_offload=not values["no_kv_offload"],
        )

    def device_params(self) -> DeviceParams:
        """How devices are used."""
        from ikpy.graph.offload_policy import offload_policy
        from ikpy.graph.placement import DeviceParams

        cuda = dict(entry.split("=", 1) for entry in self.params.cuda_params.split(",") if "=" in entry)
        batch, bf16 = cuda.get("offload-batch-size", "32"), cuda.get("bf16-batch-size", "")
        return DeviceParams(
            names=self.params.devices,
            policy=offload_policy([(-1, False)] if self.params.no_op_offload else []),
            only_active_experts=not self.params.no_ooae,
            graphs=cuda.get("graphs", "1") != "0",
            offload_batch=int(batch) if batch.isdigit() else 32,
            bf16_batch=int(bf16) if bf16.isdigit() else None,
            wgmma=cuda.get("wgmma", "1") != "0",
        )

    def context(self, model: Any, test: BenchTest) -> Any:
        """A context that just holds the test."""
        from ikpy.engine.context import Context
        from ikpy.engine.encoded_texts import needs_texts
        from ikpy.engine.params import ContextParams

        if model.arch.decoder_start is not None:
            raise needs_texts(model)
        values = test.values
        generation, batch = values["threads"]
        return Context(
            model,
            ContextParams(
                n_ctx=test.depth + test.n_prompt + test.n_gen,
                n_batch=values["n_batch"],
                n_ubatch=values["n_ubatch"],
                n_threads=generation,
                n_threads_batch=batch,
                flash_attn=values["flash_attn"],
                mla=values["mla_attn"],
                attn_max_batch=values["attn_max_batch"],
                type_k=values["type_k"],
                type_v=values["type_v"],
                smart_expert_reduction=values["ser"],
                grouped_experts=self.params.grouped_er,
                embeddings=values["embeddings"],
            ),
            log=self.log,
        )

    def embeds_only(self, model: Any) -> bool:
        """Whether a model writes no texts."""
        return bool(model.arch.is_encoder)

    def decode(self, context: Any, tokens: np.ndarray, position: int) -> None:
        """Decode tokens (int32 [n]) at the given position of sequence 0; logits of the last one."""
        from ikpy.engine.batch import Batch

        context.decode(Batch.single(tokens.tolist(), position), copy=False)


class Runner:
    """Runs tests; keeps the model while the load-time values stay the same."""

    def __init__(self, params: BenchParams, engine: Engine) -> None:
        self.params = params
        self.engine = engine
        self.random = np.random.default_rng(RANDOM_SEED)
        self.model: Any = None
        self.loaded: tuple[Any, ...] | None = None

    def run(self, test: BenchTest) -> Result:
        """Measure one test.

        Raises:
            NothingWrittenError: the test generates, and the model embeds texts only.
            IkpyError: the model cannot be loaded or the context not be created.
        """
        self.load(test)
        if test.n_gen and self.engine.embeds_only(self.model):
            raise NothingWrittenError(test.model)
        context = self.engine.context(self.model, test)
        result = Result(
            test,
            model_description(self.model.gguf),
            self.model.size_bytes,
            self.model.n_params,
            datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        if self.params.warmup:
            context.kv.clear()
            self.prompt(context, min(test.n_prompt, 1), test)
            self.generate(context, min(test.n_gen, 1), 0)
        for _ in range(self.params.repetitions):
            self.fill(context, test, again=bool(result.samples_ns))
            began = time.perf_counter_ns()
            self.prompt(context, test.n_prompt, test, test.depth)
            if test.at_depth:
                began = time.perf_counter_ns()
            self.generate(context, test.n_gen, test.depth + test.n_prompt)
            result.samples_ns.append(time.perf_counter_ns() - began)
        return result

    def plan(self, test: BenchTest) -> MemoryReport:
        """What a test would take in memory.

        Raises:
            IkpyError: the model is damaged or the context not possible.
        """
        from ikpy.engine.memory import memory_report

        self.load(test)
        return memory_report(self.engine.context(self.model, test))

    def load(self, test: BenchTest) -> None:
        if self.loaded == test.load_key:
            return
        self.model = None
        try:
            self.model = self.engine.load(test)
        except IkpyError as error:
            raise type(error)(f"failed to load model '{test.model}': {error}") from error
        self.loaded = test.load_key

    def fill(self, context: Any, test: BenchTest, *, again: bool) -> None:
        """Leave ``test.depth`` tokens in the cache; ``again``: those of the last repetition are there, and more."""
        if again and test.depth and context.kv.rewind(0, test.depth) == test.depth:
            return
        context.kv.clear()
        self.prompt(context, test.depth, test)
        context.kv.keep_checkpoint(0)

    def prompt(self, context: Any, n_tokens: int, test: BenchTest, position: int = 0) -> None:
        """Random tokens in pieces of n_batch from the given position; a text begins with BOS if the model adds one."""
        tokens = self.random.integers(0, self.model.hparams.n_vocab, n_tokens, dtype=np.int32)
        bos = bos_token(self.model.gguf)
        if n_tokens and position == 0 and bos is not None:
            tokens[0] = bos
        step = test.values["n_batch"]
        for start in range(0, n_tokens, step):
            self.engine.decode(context, tokens[start : start + step], position + start)

    def generate(self, context: Any, n_tokens: int, position: int) -> None:
        """Random tokens one at a time from the given position."""
        tokens = self.random.integers(0, self.model.hparams.n_vocab, n_tokens, dtype=np.int32)
        for index in range(n_tokens):
            self.engine.decode(context, tokens[index : index + 1], position + index)


def bos_token(gguf: Any) -> int | None:
    """BOS id if the vocabulary puts it in front of every text."""
    is_spm = keys.text(gguf.metadata, "tokenizer.ggml.model") == "llama"
    if not keys.flag(gguf.metadata, "tokenizer.ggml.add_bos_token", is_spm):
        return None
    bos = keys.integer(gguf.metadata, "tokenizer.ggml.bos_token_id")
    return 1 if bos is None and is_spm else bos
