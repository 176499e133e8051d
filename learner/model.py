"""The learner's models by name: loading, sharding, the forward pass over packed rows, full state for publishing and saving."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from learner.attention import NAME, packed_into
from learner.logprobs import chunked_logprobs
from learner.packing import Row, pack
from segue.errors import UserError
from segue.model_folder import check_loaded

POLICY = "policy"
"""The model that is trained and published. Others (reference, critic, adapter) come beside it under names of their own."""

Models = dict[str, "PackedModel"]


class PackedModel(nn.Module):
    """A causal language model that reads packed rows and returns what the losses need, never whole logits.

    Dropout is off (`eval`): its log-probabilities must be those of the engine, which samples without.
    """

    def __init__(self, lm: PreTrainedModel, chunk_tokens: int = 1024) -> None:
        super().__init__()
        self.lm = lm
        self.chunk_tokens = chunk_tokens
        self.eval()
        lm.set_attn_implementation(NAME)
        self._after = _logit_rule(lm.config)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, H] → logits [n, V], with the model's own scaling or soft cap."""
        return self._after(self.lm.get_output_embeddings()(hidden))

    def forward(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of the row's n sampled tokens, float32 [n].

        The row's field "temperature" [n] is applied as in sampling (1 where absent). A row without sampled tokens still touches
        every parameter, so that ranks stay in step: its empty result has a gradient, which is zero.
        """
        n = len(row.targets)
        source, targets = row.source, row.targets
        if n == 0:
            source, targets = row.positions[:1], row.tokens[:1]
        temperature = row.fields.get("temperature") if n else None
        if temperature is None:
            temperature = torch.ones(len(targets), device=row.tokens.device)
        ids = row.tokens[None]
        with packed_into(row.lengths):
            out = self.lm.base_model(
                input_ids=ids,
                # Given, so that transformers adds no packing rule of its own: ours works on positions inside a trajectory.
                attention_mask=torch.ones_like(ids, dtype=torch.bool),
                position_ids=row.positions[None],
                use_cache=False,
            )
        hidden = out.last_hidden_state[0].index_select(0, source)
        logprobs, entropies = chunked_logprobs(hidden, targets, temperature.float(), self.head, self.chunk_tokens)
        return logprobs[:n].clone(), entropies[:n]  # no view: FSDP hangs its hooks on what comes out


def _logit_rule(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What some architectures do to logits after the head (read from their modeling files in transformers)."""
    config = config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    times = getattr(config, "logit_scale", None) or 1.0
    over = getattr(config, "logits_scaling", None) or 1.0

    def rule(logits: torch.Tensor) -> torch.Tensor:
        if times != 1.0:
            logits = logits * times
        if over != 1.0:
            logits = logits / over
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return rule


def load_model(path: str | Path, chunk_tokens: int = 1024, device: torch.device | None = None) -> PackedModel:
    """The causal LM in a Hugging Face folder (or of that name), float32, on `device`, checked to be exact when packed.

    Raises `UserError`: there is no model there, its weights are not whole, or it is of a kind that the learner cannot train
    packed.
    """
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"{path} is no model: it has no config.json; name a Hugging Face model folder in model.path.")
    if not folder.is_dir() and (folder.is_absolute() or str(path).startswith((".", "~")) or folder.exists()):
        raise UserError(f"There is no model folder {path}: name a Hugging Face model folder in model.path.")
    try:
        lm, report = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except Exception as error:  # transformers, safetensors and json each raise classes of their own
        raise UserError(
            f"The model {path} cannot be loaded ({_first_line(error)}): name another folder in model.path."
        ) from error
    check_loaded(str(path), [name for name, _ in lm.named_children()], report)
    lm.to(device or torch.device("cpu"))
    return wrap_model(lm, str(path), chunk_tokens)


def wrap_model(lm: PreTrainedModel, name: str, chunk_tokens: int = 1024) -> PackedModel:
    """`lm` made ready for packed rows. Raises `UserError` if packed log-probabilities are not those of its own forward pass."""
    lm.eval()
    vocabulary = lm.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, vocabulary, (n,), generator=generator) for n in (9, 14)]
    with torch.no_grad():
        plain = []
        for ids in texts:
            here = ids.to(lm.device)
            logits = lm(input_ids=here[None], use_cache=False).logits[0, :-1].float()
            plain.append(torch.log_softmax(logits, dim=-1).gather(1, here[1:, None]).squeeze(1))
        refused = f"The model {name} ({type(lm).__name__}) cannot be trained packed"
        try:
            model = PackedModel(lm, chunk_tokens)
            masks = [(torch.arange(len(ids)) > 0).numpy() for ids in texts]
            packed, _ = model(pack([0, 1], [ids.numpy() for ids in texts], masks).to(lm.device))
        except Exception as error:
            raise UserError(f"{refused} ({_first_line(error)}): choose a model with plain attention.") from error
    gap = float((packed - torch.cat(plain)).abs().max())
    if not gap < 1e-3:
        raise UserError(f"{refused}: its log-probabilities differ by {gap:.3g} nats; choose a model with plain attention.")
    return model


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")


def shard(model: PackedModel, dtype: Literal["float32", "bfloat16"]) -> None:
    """FSDP2 over the default process group: parameters stay float32, computation is in `dtype`, gradients reduce in float32.

    Each decoder layer is gathered by itself; embeddings, final norm and head form the root group.
    """
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    names = set(model.lm._no_split_modules or ())
    for module in model.lm.modules():
        if type(module).__name__ in names:
            fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def full_tensors(model: PackedModel, keep: Collection[str]) -> dict[str, torch.Tensor]:
    """The parameters and saved buffers in `keep`, whole, under their Hugging Face names; tied ones are the same tensor under each
    name.

    A collective when sharded: all ranks call, each gets what it keeps. Unsharded tensors are the model's own memory: copy before
    the next optimizer step.
    """
    state = model.lm.state_dict(keep_vars=True)
    kept = {id(tensor) for name, tensor in state.items() if name in keep}
    whole: dict[int, torch.Tensor] = {}
    for tensor in state.values():
        if id(tensor) in whole:
            continue
        full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        whole[id(tensor)] = full if id(tensor) in kept else tensor
    return {name: whole[id(tensor)] for name, tensor in state.items() if name in keep}


def meta_tensors(model: PackedModel) -> dict[str, torch.Tensor]:
    """What `full_tensors` would give for all names, on the meta device: names, shapes, dtypes and ties without memory."""
    metas: dict[int, torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, tensor in model.lm.state_dict(keep_vars=True).items():
        if id(tensor) not in metas:
            metas[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        result[name] = metas[id(tensor)]
    return result
