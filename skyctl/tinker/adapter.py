"""A frozen causal LM from a Hugging Face checkpoint, and the parameters trained over it.

These are LoRA adapters, applied by forward hooks, so that the adapters of many models share one
base; or with rank 0 a copy of all its parameters, which several ranks shard. An adapter's files are
PEFT's: `base_model.model.<module>.lora_{A,B}.weight`, with alpha 32, so the scale is 32/rank. Those
of a whole model are what transformers writes.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from skyctl.tinker import files
from skyctl.tinker.losses import LossError
from skyctl.tinker.low_rank import ALPHA, LowRank, Parameters, rank_of
from skyctl.tinker.ranks import OutOfStep, Ranks
from skyctl.tinker.sharded import ShardedModel, Shards, stored

T = TypeVar("T")
LARGEST_RANK = 128
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
UNEMBED = ("lm_head",)
MOST_OF_A_GPU = 0.7
"""The share of a GPU's memory that a base may take which every rank has whole."""
MOST_LOGITS = 1 << 26
"""Maximum elements of the logits that exist at a time: 256 MiB in float32, a few times over."""
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoraConfig:
    """The SDK's `lora_config`."""

    rank: int
    """Rank of the adapter; 0 trains all parameters."""
    seed: int
    """Seed of the first values; the server chooses one if the client gives none."""
    train_unembed: bool = True
    """Train the output layer."""
    train_mlp: bool = True
    """Train the layers of the MLPs."""
    train_attn: bool = True
    """Train the layers of attention."""


class Base:
    """The shared base model. Its weights never change; `using` selects what is computed with. With
    `checkpointing`, activations are recomputed for the gradient instead of kept. Several ranks
    `shard` it, or each has all of it; None: as a GPU's memory allows.

    Raises:
        OSError, ValueError: transformers cannot load the checkpoint.
    """

    def __init__(
        self,
        path: str,
        *,
        device: str,
        dtype: str,
        checkpointing: bool = False,
        ranks: Ranks | None = None,
        shard: bool | None = None,
    ) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), local_files_only=Path(path).is_dir()
        )
        self.model: Any = model.eval().requires_grad_(False)
        self.path = path
        self.device = torch.device(device)
        self.ranks = ranks or Ranks()
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.architecture = str((model.config.architectures or [type(model).__name__])[0])
        text = model.config.get_text_config()
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.context = int(getattr(text, "max_position_embeddings", 0) or 2**31)
        self.experts = int(getattr(text, "num_experts", 0) or getattr(text, "num_local_experts", 0))
        endings = ATTENTION + MLP + UNEMBED
        self.linears: dict[str, torch.nn.Linear] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and name.rsplit(".", 1)[-1] in endings
        }
        self._active: tuple[Mapping[str, Tensor], float] | None = None
        self._places: dict[int, list[tuple[Any, str]]] = {}  # by parameter; a tied one has several
        for module in model.modules():
            for leaf, value in module.named_parameters(recurse=False):
                self._places.setdefault(id(value), []).append((module, leaf))
        for name, linear in self.linears.items():
            linear.register_forward_hook(partial(self._add, name))
        self._module: ShardedModel | None = None
        self.sharded, self.shard_reason = self._shards(shard)
        if not self.sharded:
            model.to(device)
        self._splits = self._is_split()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for module in model.modules():  # only these read the flag: dropout stays off below them
                module.training = bool(getattr(module, "gradient_checkpointing", False))
        if self.sharded:
            self._module = self._divided(self.dtype, trained=False)
            own = dict(model.named_parameters())
            self._module.shards.fill(lambda name, rows: own[name][rows])
            for value in own.values():
                self._put(value, torch.nn.Parameter(value.to("meta"), requires_grad=False))

    def _shards(self, shard: bool | None) -> tuple[bool, str]:
        """Whether ranks divide the base, and the reason where that was not chosen."""
        if self.ranks.size == 1 or shard is not None or self.device.type == "cpu":
            return self.ranks.size > 1 and bool(shard), ""
        size = sum(value.nbytes for value in self.model.parameters())
        _, memory = torch.cuda.mem_get_info(self.device)
        reports = self.ranks.exchange(b"1" if size > MOST_OF_A_GPU * memory else b"0")
        if b"1" not in reports:
            return False, ""
        text = f"the base takes {size / 2**30:.0f} of the {memory / 2**30:.0f} GiB of {self.device}"
        return True, f"{text}: {self.ranks.size} ranks shard it"

    def _divided(self, dtype: torch.dtype, *, trained: bool) -> ShardedModel:
        return ShardedModel(
            self.model,
            self.ranks,
            self.device,
            dtype=dtype,
            computes_in=self.dtype,
            trained=trained,
            shared=self,
        )

    def targets(self, config: LoraConfig) -> list[str]:
        """The linear layers that an adapter with this configuration trains.

        Raises:
            LossError: the model has none for a requested group.
        """
        groups = (
            (config.train_attn, "train_attn", ATTENTION),
            (config.train_mlp, "train_mlp", MLP),
            (config.train_unembed, "train_unembed", UNEMBED),
        )
        if not 1 <= config.rank <= LARGEST_RANK:
            raise LossError(f"rank {config.rank} is not offered: 0 to {LARGEST_RANK}")
        if config.train_mlp and self.experts:
            raise LossError(
                "train_mlp is not offered for mixture-of-experts models here: set train_mlp=False"
            )
        layers: list[str] = []
        for trained, flag, endings in groups:
            names = [name for name in self.linears if name.rsplit(".", 1)[-1] in endings]
            if trained and not names:
                raise LossError(f"{self.architecture} has no layers for {flag}: set {flag}=False")
            layers += names if trained else []
        if not layers:
            raise LossError("train_attn, train_mlp and train_unembed are all false: nothing to do")
        return layers

    def new_parameters(self, config: LoraConfig) -> Parameters:
        """A random A and a zero B for each layer, the same bits for the same config; with rank 0 a
        copy of the base's own.

        Raises:
            LossError: they cannot be trained here.
        """
        if config.rank == 0:
            if not (config.train_attn and config.train_mlp and config.train_unembed):
                raise LossError("rank 0 trains all parameters: leave train_* at their defaults")
            own = dict(self.model.named_parameters())
            if self.ranks.size == 1:
                return {name: value.detach().float().clone() for name, value in own.items()}
            shards = self._divided(torch.float32, trained=True).shards
            mine = self._module.shards if self._module else {}
            shards.fill(lambda name, rows: mine[name] if mine else own[name][rows])
            return shards
        generator = torch.Generator().manual_seed(config.seed)
        parameters: Parameters = {}
        for name in self.targets(config):
            linear = self.linears[name]
            bound = 1 / math.sqrt(linear.in_features)
            a = torch.empty(config.rank, linear.in_features).uniform_(
                -bound, bound, generator=generator
            )
            parameters[f"{name}.lora_A"] = a.to(self.device)
            parameters[f"{name}.lora_B"] = torch.zeros(
                linear.out_features, config.rank, device=self.device
            )
        return parameters

    @contextlib.contextmanager
    def using(self, parameters: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Inside, compute with these parameters (None: the base alone), gradients included.

        Raises:
            OutOfStep: this rank failed, and others compute with it.
        """
        before = self._active, self._module
        rank, own = rank_of(parameters or {}), {}
        self._active = (parameters, ALPHA / rank) if parameters and rank else None
        if isinstance(parameters, Shards):
            self._module = parameters.module
        elif parameters and not rank:
            own = dict(self.model.named_parameters())
        try:
            for name, value in own.items():
                self._put(value, (parameters or {})[name].to(self.dtype))
            yield
        except Exception as error:
            if self._module is None or isinstance(error, LossError):
                raise
            raise OutOfStep(repr(error)) from error
        finally:
            self._active, self._module = before
            for value in own.values():
                self._put(value, value)

    def together(self, parameters: Mapping[str, Tensor] | None) -> bool:
        """Whether all ranks compute with these parameters at the same time."""
        return self.sharded or isinstance(parameters, Shards)

    def inside(self, compute: Callable[[], T]) -> T:
        """What this returns, which calls parts of the model."""
        return compute() if self._module is None else self._module(compute)

    def _put(self, own: Tensor, value: Tensor) -> None:
        """Put a value in the place of this parameter of the base."""
        for module, leaf in self._places[id(own)]:
            module._parameters[leaf] = value

    def hidden(self, rows: Sequence[Tensor]) -> Tensor:
        """The last hidden states (rows, longest row, width) of int64 token rows, padded on the
        right: what `logits` takes. Those beyond a row's own length are meaningless.
        """
        longest = max(len(row) for row in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros(len(rows), longest, dtype=torch.int64)
        for place, row in enumerate(rows):
            tokens[place, : len(row)], mask[place, : len(row)] = row, 1
        return self._states(tokens.to(self.device), mask.to(self.device))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits (…, vocabulary)."""
        logits: Tensor = self._running.get_output_embeddings()(hidden) if self._splits else hidden
        return logits.float()

    def chunks(self, positions: int) -> list[slice]:
        """Cuts positions so that the logits of a part stay below `MOST_LOGITS`."""
        size = max(1, MOST_LOGITS // self.vocabulary)
        return [slice(begin, begin + size) for begin in range(0, positions, size)]

    def logprobs(
        self, rows: Sequence[Tensor], targets: Sequence[Tensor], *, entropy: bool = False
    ) -> tuple[list[Tensor], list[Tensor]]:
        """log p of each row's targets (N, K), and if wanted the entropy at each place (N,). The
        gradient computes the logits of one chunk of positions after the other again, so that no two
        exist at once.
        """
        compute = partial(self._logprobs, rows, targets, entropy)
        picked, entropies = self.inside(compute)
        lengths = [len(row) for row in rows]
        split = zip(picked.split(lengths), targets, strict=True)
        logprobs = [lp[:, : target.shape[1]] for lp, target in split]
        return logprobs, list(entropies.split(lengths)) if entropy else []

    def _logprobs(
        self, rows: Sequence[Tensor], targets: Sequence[Tensor], entropy: bool
    ) -> tuple[Tensor, Tensor]:
        states, most = self.hidden(rows), max(target.shape[1] for target in targets)
        flat = torch.cat([state[: len(row)] for state, row in zip(states, rows, strict=True)])
        wide = torch.cat([pad(target, (0, most - target.shape[1])) for target in targets])
        cuts = self.chunks(len(flat))
        again = torch.is_grad_enabled() and len(cuts) > 1
        call = partial(checkpoint, self._picked, use_reentrant=False) if again else self._picked
        picked, entropies = zip(*[call(flat[cut], wide[cut], entropy) for cut in cuts], strict=True)
        return torch.cat(picked), torch.cat(entropies)

    def _picked(self, hidden: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        logits = self.logits(hidden)
        total = torch.logsumexp(logits, dim=-1, keepdim=True)
        entropies = logits.new_zeros(0)
        if entropy:
            with torch.no_grad():
                entropies = total[:, 0] - (torch.exp(logits - total) * logits).sum(-1)
        return logits.gather(1, targets) - total, entropies

    @property
    def _running(self) -> Any:
        """The model that computes."""
        return self.model if self._module is None else self._module.model

    def _states(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """The last hidden states; logits where `_splits` is false."""
        inputs = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
        if not self._splits:
            logits: Tensor = self._running(**inputs).logits
            return logits
        hidden: Tensor = self._running.base_model(**inputs).last_hidden_state
        return hidden

    def _is_split(self) -> bool:
        """Whether the model's logits are its output layer's of its last hidden states, and nothing
        more.
        """
        probe = torch.arange(2, device=next(self.model.parameters()).device)[None]
        mask = torch.ones_like(probe)
        with contextlib.suppress(AttributeError, TypeError, RuntimeError), torch.no_grad():
            self._splits = False
            whole = self.logits(self._states(probe, mask))
            self._splits = True
            return bool(torch.equal(self.logits(self._states(probe, mask)), whole))
        return False

    def write(self, parameters: Parameters, directory: Path, dtype: torch.dtype) -> None:
        """Write the trained parameters: an adapter for PEFT, or a model in `dtype` for
        transformers, with the base's tokenizer.
        """
        if rank_of(parameters):
            tensors = {
                f"{_PREFIX}{name}.weight": value.detach().cpu().contiguous()
                for name, value in parameters.items()
            }
            save_file(tensors, directory / files.ADAPTER, {"format": "pt"})
            return
        self.write_model({n: v.detach().to(dtype) for n, v in parameters.items()}, directory)
        self.describe(directory)

    def write_model(self, values: dict[str, Tensor], directory: Path) -> None:
        """Write these parameters of a whole model for transformers: rank 0 also what describes the
        model, and its buffers.
        """
        if self.ranks.rank:  # there `save_pretrained` writes nothing
            from transformers.core_model_loading import revert_weight_conversion

            directory.mkdir(parents=True)
            values = revert_weight_conversion(self.model, values)
            save_file(values, directory / "model.safetensors", {"format": "pt"})
            return
        kept = self.model.state_dict().keys()
        values |= {name: value for name, value in self.model.named_buffers() if name in kept}
        self.model.save_pretrained(directory, state_dict=values)

    def describe(self, directory: Path) -> None:
        """Add the base's tokenizer, and what else is beside its weights."""
        for path in files.beside_weights(Path(self.path)):
            if not (directory / path.name).exists():
                shutil.copyfile(path, directory / path.name)

    def read(self, directory: Path, config: LoraConfig) -> Parameters:
        """Read what `write` wrote, in the order of new parameters: sums over all of them are the
        same bits.
        """
        if config.rank:
            tensors = load_file(directory / files.ADAPTER)
            names = [f"{name}.lora_{part}" for name in self.targets(config) for part in "AB"]
            adapter = {name: tensors[f"{_PREFIX}{name}.weight"] for name in names}
            return {name: value.to(self.device, torch.float32) for name, value in adapter.items()}
        shards = self._divided(torch.float32, trained=True).shards if self.ranks.size > 1 else None
        with contextlib.ExitStack() as stack:
            rows_of = stored(stack, sorted(directory.glob("*.safetensors")))
            if shards is not None and shards.keys() <= rows_of.keys():
                shards.fill(lambda name, rows: rows_of[name](rows))
                return shards
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True
        )
        values = {name: value.detach() for name, value in model.named_parameters()}
        if shards is None:
            return {name: value.to(self.device) for name, value in values.items()}
        shards.fill(lambda name, rows: values[name][rows])
        return shards

    def _add(self, name: str, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
        """The output of a linear layer with the active adapter; None if it has no part here."""
        parameters, scale = self._active or ({}, 0.0)
        if f"{name}.lora_A" not in parameters:
            return None
        a, b = parameters[f"{name}.lora_A"], parameters[f"{name}.lora_B"]
        return LowRank.apply(output, inputs[0], a, b, scale)
