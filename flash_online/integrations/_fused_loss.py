"""fuse_loss: computes a transformers model's training loss by linear_cross_entropy, without the logits.

No model is known by name here, and no loss function is replaced. While a forward pass has labels, a proxy replaces the model's
output layer and returns `_Logits`: the hidden states, with a record of the operations that the model and its loss function
apply to the logits (a scale, a softcap, a cast, row slices). Their torch.nn.functional.cross_entropy computes the product and
the loss in one call of the output layer, so that its hooks (FSDP2 gathers the weight in one) run as before, and once.
Operations that _Logits cannot record are refused by name.

Hooks of the output layer run in that one call. Pre-hooks get the input that the plain model passes; the row operations on the
logits are repeated on the rows that they return. Forward hooks get the loss, and may read it; a hook that changes it is
refused, since it was written for logits.
"""

from __future__ import annotations

import inspect
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module_hooks  # global hooks of all modules

from ..functional import ORIGINALS, cross_entropy
from ..linear_cross_entropy import linear_cross_entropy, product_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

_STATE = "_flash_online_fused_loss"  # the attribute of a model that holds its FusedLoss


class UnsupportedLogits(NotImplementedError, AttributeError):
    """An operation of a model or its loss function on the logits that fuse_loss cannot do without them. Also an AttributeError,
    so that hasattr() works on the proxy logits."""


def _refusal(what: str) -> UnsupportedLogits:
    return UnsupportedLogits(
        f"fuse_loss: the model or its loss function {what}, which fuse_loss does not do without the table of logits; call "
        "remove() on the handle that fuse_loss returned, and train this model with its own loss"
    )


def _wrong_head(what: str) -> UnsupportedLogits:
    return UnsupportedLogits(
        f"fuse_loss: output layer: expected a torch.nn.Linear with its own forward, got {what}. Exclude the output layer from "
        "wrappers and replacements, or train this model with its own loss"
    )


class _Loss:
    """A call of cross_entropy, passed through the output layer's hooks as one object, which no hook takes apart."""

    def __init__(self, logits: _Logits, target: Tensor, options: dict[str, Any]):
        self.logits, self.target, self.options = logits, target, options
        self.loss: Tensor | None = None  # the output of the layer's forward, and its version at that time
        self.version = 0
        self.entropy: Tensor | None = None  # of each target, if it is wanted

    def rows_of(self, input: Tensor) -> Tensor:
        """The rows of the logits, of an input of the output layer, which hooks may have changed."""
        if input is self.logits._input:
            return self.logits._hidden
        for function in self.logits._rows:
            input = function(input)
        return input

    def check_output(self, output) -> None:
        """Raises UnsupportedLogits if a hook changed the loss."""
        dtype = self.logits.dtype
        if isinstance(output, Tensor) and output.dtype != dtype:
            raise _refusal(f"has a hook on the output layer that makes {output.dtype} of its {dtype} outputs")
        same = output is self.loss
        if not torch.compiler.is_compiling() and isinstance(output, Tensor) and self.loss is not None:
            # DeepSpeed's hooks return an alias. Versions and addresses are unknown while Dynamo traces.
            same = (same or output.is_set_to(self.loss)) and output._version == self.version
        if not same:
            raise _refusal("has a hook on the output layer, or a replaced forward, that changes its outputs")


class _Logits:
    """Proxy for the logits of an output layer: softcap * tanh(factor * z) or, without a softcap, factor * z. z [..., C] are the
    layer's outputs for `hidden` [..., H]: the rows of the layer's `input` after the functions `rows`."""

    def __init__(self, state: FusedLoss, head: nn.Linear, input: Tensor, products: torch.dtype, dtype: torch.dtype):
        self._state, self._head, self._input, self._hidden = state, head, input, input
        self._rows: tuple[Callable[[Tensor], Tensor], ...] = ()
        self._products, self.dtype = products, dtype  # the layer's compute dtype and the logits' dtype
        self._factor: float = 1.0
        self._softcap: float | None = None

    def _with(self, dtype=None, factor: float | None = None, softcap=None) -> _Logits:
        other = _Logits(self._state, self._head, self._input, self._products, self.dtype if dtype is None else dtype)
        other._hidden, other._rows = self._hidden, self._rows
        other._factor = self._factor if factor is None else factor
        other._softcap = self._softcap if softcap is None else softcap
        return other

    def _of_rows(self, function: Callable[[Tensor], Tensor]) -> _Logits:
        """The logits of other rows: `function` maps tensors [..., H]."""
        other = self._with()
        other._hidden, other._rows = function(self._hidden), (*self._rows, function)
        return other

    # Properties known without the logits.

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._head.out_features))

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def ndim(self) -> int:
        return self._hidden.dim()

    def dim(self) -> int:
        return self._hidden.dim()

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    # Scaling, tanh, casts.

    def _times(self, number, what: str) -> _Logits:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number) or number == 0:
            described = "a tensor" if isinstance(number, Tensor) else repr(number)
            raise _refusal(f"{what} its logits by {described}")
        if self._softcap is None:
            return self._with(factor=self._factor * number)
        return self._with(softcap=self._softcap * number)

    def __mul__(self, number) -> _Logits:
        return self._times(number, "multiplies")

    __rmul__ = mul = __mul__

    def __truediv__(self, number) -> _Logits:
        if isinstance(number, (int, float)) and number != 0:
            return self._times(1 / number, "divides")
        return self._times(number, "divides")

    div = __truediv__

    def tanh(self) -> _Logits:
        if self._softcap is not None:
            raise _refusal("applies tanh to its logits twice")
        return self._with(softcap=1.0)

    def to(self, *args, **kwargs) -> _Logits:
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        cast = like.to(*args, **kwargs)
        if cast.device != self.device:
            raise _refusal(f"moves its logits from {self.device} to {cast.device}")
        if torch.promote_types(cast.dtype, self.dtype) != cast.dtype:
            raise _refusal(f"rounds its logits from {self.dtype} to {cast.dtype}")
        return self._with(dtype=cast.dtype)

    def type(self, dtype: torch.dtype) -> _Logits:
        return self.to(dtype)

    def float(self) -> _Logits:
        return self.to(torch.float32)

    def double(self) -> _Logits:
        return self.to(torch.float64)

    # Rows.

    def contiguous(self) -> _Logits:
        return self

    def view(self, *shape) -> _Logits:
        sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
        if len(sizes) == 1 and isinstance(sizes[0], torch.dtype):
            raise _refusal("reads its logits as another dtype")
        rows, classes = math.prod(self.shape[:-1]), self._head.out_features
        if sizes and sizes[-1] == -1:
            known = math.prod(sizes[:-1])
            sizes[-1] = rows * classes // known if known > 0 else classes
        if not sizes or sizes[-1] != classes:
            raise _refusal(f"views its logits {list(self.shape)} as {list(shape)}, with other classes than the output layer's,")
        return self._of_rows(lambda hidden: hidden.reshape(*sizes[:-1], hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> _Logits:
        if end_dim % max(self.ndim, 1) == self.ndim - 1:
            raise _refusal("flattens its logits")
        return self._of_rows(lambda hidden: hidden.flatten(start_dim, end_dim))

    def __getitem__(self, key) -> _Logits:
        keys = key if isinstance(key, tuple) else (key,)
        taken, rest = 0, False  # number of dimensions that the keys index, and whether the last is indexed
        for one in keys:
            if one is Ellipsis:
                rest = True
            elif one is not None:
                taken += one.dim() if isinstance(one, Tensor) and one.dtype == torch.bool else 1
        last = taken == self.ndim or (rest and keys[-1] is not Ellipsis)
        whole = isinstance(keys[-1], slice) and (keys[-1].start, keys[-1].stop, keys[-1].step) == (None, None, None)
        if last and not whole:
            raise _refusal(f"takes a part of its classes, logits[{', '.join(map(_described, keys))}]")
        return self._of_rows(lambda hidden: hidden[key])

    # Functions of torch.

    def __getattr__(self, name: str):
        raise _refusal(f"reads logits.{name}")

    def __add__(self, other):
        raise _refusal("adds something to its logits")

    __radd__ = __sub__ = __rsub__ = add = sub = __add__

    def __setitem__(self, key, value):
        raise _refusal("writes to its logits")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        logits = args[0] if args else kwargs.get("input")
        if isinstance(logits, _Logits):
            if function in (ORIGINALS["cross_entropy"], cross_entropy):  # ours under flash_online.override()
                return _cross_entropy(*args, **kwargs)
            if function in (torch.tanh, nn.functional.tanh):
                return logits.tanh()
        raise _refusal(f"calls {getattr(function, '__qualname__', function)} on its logits")


class _StandIn:
    """Proxy for an output layer in a forward pass: a call returns _Logits; all else is forwarded to the layer."""

    def __init__(self, state: FusedLoss, head: nn.Linear):
        self._state, self._head = state, head

    def __call__(self, input: Tensor) -> _Logits:
        dtype = product_dtype(input)
        return _Logits(self._state, self._head, input, dtype, dtype)

    def __getattr__(self, name: str):
        return getattr(self._head, name)


def _described(key) -> str:
    return f"{key.dtype} of shape {list(key.shape)}" if isinstance(key, Tensor) else repr(key)


def _cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index: int = -100,
    reduce=None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """torch.nn.functional.cross_entropy of _Logits."""
    if input.ndim > 2:
        raise _refusal(f"takes the cross-entropy of logits {list(input.shape)} along dimension 1")
    if size_average is not None or reduce is not None:
        reduction = nn._reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    if product_dtype(input._hidden) != input._products:
        raise _refusal("calls the output layer and the loss under different autocasts")
    cap, factor = input._softcap, input._factor
    options = {
        "weight": weight,
        "ignore_index": None if target.is_floating_point() else ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "softcap": 0.0 if cap is None else abs(cap),
        "scale": factor if cap is None else factor * cap,
        "dtype": input.dtype,
        "return_entropy": input._state.return_entropy,
    }
    call = _Loss(input, target, options)
    loss = input._head(input._input, flash_online_loss=call)
    call.check_output(loss)
    input._state._losses += 1
    input._state.entropy = call.entropy
    return loss


class _HeadForward:
    """The forward of an output layer: its own, or the loss for _cross_entropy. A class instance, so that it can be pickled."""

    def __init__(self, head: nn.Linear):
        self.head = head

    def __call__(self, input: Tensor, flash_online_loss: _Loss | None = None) -> Tensor:
        head, call = self.head, flash_online_loss
        if call is None:
            return type(head).forward(head, input)
        for tensor in (input, head.weight):
            if type(tensor).__name__ == "DTensor":
                raise _wrong_head("one sharded inside its own forward (a DTensor, as under tensor parallelism)")
        _check_weight(head.weight)
        hidden = call.rows_of(input)
        loss = linear_cross_entropy(hidden, head.weight, call.target, linear_bias=head.bias, **call.options)
        if call.options["return_entropy"]:
            loss, call.entropy = loss
        if not torch.compiler.is_compiling():
            call.version = loss._version
        elif head._forward_hooks or _module_hooks._global_forward_hooks:
            loss = loss.unsqueeze(0).unbind(0)[0]  # one of several views: autograd forbids in-place writes to it
        call.loss = loss
        return loss


class FusedLoss:
    """The handle that `fuse_loss` returns: `remove()` restores the model's own forward.

    Attributes:
        model: the model.
        return_entropy: whether forward passes with labels compute `entropy`.
        entropy: float32, of the shape of the targets of the model's last loss (its loss function shifts and flattens them): the
            entropy in nats of each row's softmax, differentiable; 0 where a target is ignored. None before such a pass.
    """

    def __init__(self, model: nn.Module, owner: nn.Module, name: str):
        self.model, self._losses = model, 0  # number of losses computed in the current forward pass
        self.return_entropy, self.entropy = False, None
        self._owner, self._name, self._head = owner, name, None
        self._plain = model.__dict__.get("forward")  # None: the class's forward
        _, *self._parameters = inspect.signature(type(model).forward).parameters
        self._active = self._running = False
        self._watch: Any = None  # the handle of a _Watch

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"entropy": None}  # a copy of the model has no part in this one's graph

    def _activate(self) -> None:
        self._check_head()
        if not self._active:
            if _STATE not in self.model.__dict__:
                self.model.__dict__["forward"] = _ModelForward(self)
            self.model.__dict__[_STATE] = self
            backbone = self.model.base_model
            if backbone is not self.model:
                self._watch = backbone.register_forward_pre_hook(_Watch(self))
        self._active = True

    def _check_head(self) -> None:
        """Prepares the output layer, which the model may have replaced (a new vocabulary, an adapter). Raises
        UnsupportedLogits unless it is a plain linear layer."""
        head = self._owner._modules[self._name]
        if any((head._backward_hooks, head._backward_pre_hooks, _module_hooks._global_backward_hooks)) or (
            _module_hooks._global_backward_pre_hooks
        ):
            raise _refusal("has a backward hook on the output layer or on all modules, written for the gradient of logits")
        if head is self._head:
            return
        kind = type(head)
        if not isinstance(head, nn.Linear) or kind.forward is not nn.Linear.forward:
            raise _wrong_head(f"a {kind.__module__}.{kind.__qualname__}")
        _check_weight(head.weight)
        if "forward" in head.__dict__:
            if not isinstance(head.__dict__["forward"], _HeadForward):
                raise _wrong_head("one with a replaced forward, as by offloading or another patch")
        else:
            head.__dict__["forward"] = _HeadForward(head)
        self._head = head

    def _computes_loss(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a forward pass with these arguments uses the fused loss."""
        if not (self._active and self.model.training):
            return False
        if kwargs.get("fused_lm_head"):
            return False  # TRL's fused loss, see _Watch
        if kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None:
            return True
        at = self._parameters.index("labels")
        return len(args) > at and args[at] is not None

    def _run(self, args: tuple, kwargs: dict[str, Any]):
        model = self.model
        plain = type(model).forward if self._plain is None else self._plain
        arguments = (model, *args) if self._plain is None else args
        if not self._computes_loss(args, kwargs):
            return plain(*arguments, **kwargs)
        self._check_head()
        head, self._losses = self._head, 0
        # Instance attributes shadow the module of the same name, which keeps its place, parameters and hooks.
        self._owner.__dict__[self._name] = _StandIn(self, head)
        self._running = True
        try:
            output = plain(*arguments, **kwargs)
        finally:
            self._running = False
            del self._owner.__dict__[self._name]
        if self._losses == 0:
            raise _refusal("was given labels, and computed no cross-entropy of its logits")
        return _without_logits(output)

    def remove(self) -> None:
        """Undoes fuse_loss: the model computes its loss from logits again. A second call changes nothing."""
        if self.model.__dict__.get(_STATE) is not self:
            return
        self._active, self.entropy = False, None
        if self._head is not None and isinstance(self._head.__dict__.get("forward"), _HeadForward):
            del self._head.__dict__["forward"]
        self._head = None
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
        # If our forward was wrapped since, it stays and forwards every call.
        if isinstance(self.model.__dict__.get("forward"), _ModelForward):
            del self.model.__dict__["forward"], self.model.__dict__[_STATE]
            if self._plain is not None:
                self.model.__dict__["forward"] = self._plain


class _ModelForward:
    """The forward of a model with a fused loss, with the signature of the previous forward. A class instance, so that pickle
    and deepcopy work: a copy of the model gets a copy of it."""

    def __init__(self, state: FusedLoss):
        self.state = state
        self.__doc__ = (type(state.model).forward if state._plain is None else state._plain).__doc__

    def __call__(self, *args, **kwargs):
        return self.state._run(args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        if self.state._plain is not None:
            return inspect.signature(self.state._plain)
        signature = inspect.signature(type(self.state.model).forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])  # without self


class _Watch:
    """A hook before the model's backbone: warns if TRL's fused head computes the loss. It may wrap or be wrapped by our
    forward. If TRL's is requested (`fused_lm_head=True`, in each step of an SFTTrainer), the caller needs its results, the
    tokens' log-probabilities and entropy, so it takes precedence and fuse_loss has no effect."""

    def __init__(self, state: FusedLoss):
        self.state = state

    def __call__(self, module: nn.Module, args: tuple) -> None:
        state = self.state
        if state._running or not state._active or not state.model.training:
            return
        if _is_of_trl(state.model.__dict__.get("forward")) or _is_of_trl(state._plain):
            warnings.warn(_TRL_WINS, stacklevel=2)


_TRL_WINS = (
    "fuse_loss: TRL's fused LM head computes the loss of this model, and fuse_loss has no effect in calls that request it; "
    "with TRL's trainers leave fuse_loss out"
)


def _is_of_trl(forward) -> bool:
    """Whether it is the forward that trl.trainer.utils.add_fused_lm_head gives a model. functools.wraps copied the model's own
    name and signature to it, but not the code."""
    code = getattr(getattr(forward, "__func__", None), "__code__", None)
    return code is not None and "fused_lm_head" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _check_weight(weight: Tensor) -> None:
    """Raises UnsupportedLogits for a library's own tensor subclass, which is not a matrix that a kernel can read."""
    kind = type(weight)
    if kind.__torch_dispatch__ is not nn.Parameter.__torch_dispatch__ and not kind.__module__.startswith("torch."):
        raise _wrong_head(f"a Linear with a weight of type {kind.__module__}.{kind.__qualname__}, as in a quantised model")


def _without_logits(output):
    """A model's output with None instead of each _Logits."""
    if isinstance(output, _Logits):
        return None
    if isinstance(output, dict):  # a ModelOutput is one, and holds no None
        if any(isinstance(value, (_Logits, dict, tuple)) for value in output.values()):
            return type(output)(**{name: _without_logits(value) for name, value in output.items()})
        return output
    if type(output) is tuple:
        return tuple(_without_logits(value) for value in output)
    return output


def fuse_loss(model: nn.Module, *, return_entropy: bool = False) -> FusedLoss:
    """Makes a transformers model compute its loss with `flash_online.linear_cross_entropy` when it trains with labels: output
    layer and loss together, without the logits `[batch, length, vocabulary]` and their float32 copy.

    It applies in training mode with labels; the output's `logits` are then None. In eval mode and without labels nothing
    changes. The loss is the model's own: its loss function, shift, `num_items_in_batch`, `ignore_index`, scale and softcap of
    the logits (Gemma 2 to 4, Granite, Cohere) and added terms (a router's auxiliary loss), with float32 sums if the model
    upcasts logits to float32. Parameters, their names, hooks and FSDP2's sharding do not change, so the order of fuse_loss and
    fully_shard does not matter.

    Args:
        model: a transformers.PreTrainedModel with a plain torch.nn.Linear output layer and a forward that takes `labels`; pass
            the model inside a wrapper (PEFT, DDP, torch.compile).
        return_entropy: forward passes with labels leave each target's entropy in the handle's attribute `entropy`, for a term
            of the loss, computed from the same logits in chunks. Hooks of the output layer do not see it.

    Returns:
        A handle with `remove()`. A second call returns the same handle, and sets return_entropy anew.

    Raises:
        TypeError: model is not a transformers.PreTrainedModel.
        UnsupportedLogits: (a NotImplementedError) the output layer is not as above, or forward takes no labels; in a forward
            pass: the model or its loss function applies an operation to the logits that needs all of them.
        ImportError: transformers is not installed.

    Source: the purpose of Liger Kernel's fused losses (arXiv 2410.10989), without a custom forward per model.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: expected a transformers.PreTrainedModel, got {type(model).__name__}; pass the model "
            "inside a wrapper (for PEFT: model.get_base_model())"
        )
    present = model.__dict__.get(_STATE)
    if present is not None:
        present._activate()
        present.return_entropy = return_entropy
        return present
    if "labels" not in inspect.signature(type(model).forward).parameters:
        raise UnsupportedLogits(
            f"fuse_loss: the forward of {type(model).__name__} takes no labels, so there is no loss to fuse"
        )
    head = model.get_output_embeddings()
    places = ((owner, name) for owner in model.modules() for name, module in owner._modules.items() if module is head)
    owner, name = next(places, (None, None))
    if head is None or owner is None:
        raise UnsupportedLogits(f"fuse_loss: {type(model).__name__} has no output layer (get_output_embeddings() is {head})")
    handle = FusedLoss(model, owner, name)
    handle.return_entropy = return_entropy
    handle._activate()
    return handle
