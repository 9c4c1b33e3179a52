"""The network of ``lightning-bilevel clean``: a default by the data, or a class of the user."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bilevel.modules.networks import MLP, SmallCNN

__all__ = ["Network", "network_for"]

Network = Callable[[], nn.Module]

_HIDDEN = 128
# Images of at most so many pixels have little for a convolution to find.
_TINY = 16 * 16


def network_for(inputs: Tensor, classes: int, model: str | None = None) -> Network:
    """Return what makes a fresh classifier, after it has made one and tried it on two samples.

    Args:
        inputs: The training inputs.
        classes: The number of classes.
        model: The dotted path of a class, or of a function that returns a module. It is called with
            those of the arguments ``inputs`` (the values of a sample), ``channels`` (of an image),
            ``classes`` and ``num_classes`` that it has. None is an MLP for features and images of
            at most 16x16 pixels, and a small convolutional network for larger ones.
    """
    shape = inputs.shape[1:]
    if model is not None:
        made: Network = _named(model, shape, classes)
    elif len(shape) == 1 or prod(shape[1:]) <= _TINY:
        made = partial(MLP, prod(shape), _HIDDEN, classes)
    else:
        made = partial(SmallCNN, shape[0], classes)
    _try(model or "default", made, inputs[:2], classes)
    return made


def _named(path: str, shape: tuple[int, ...], classes: int) -> Network:
    found = _import(path)
    given = {
        "inputs": prod(shape),
        "channels": shape[0],
        "classes": classes,
        "num_classes": classes,
    }
    parameters = inspect.signature(found).parameters
    chosen = {name: value for name, value in given.items() if name in parameters}
    passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if passes_on and not {"classes", "num_classes"} & set(chosen):
        # As the models of torchvision do, which hand their options on.
        chosen["num_classes"] = classes
    return partial(found, **chosen)


def _import(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    # A file in the current folder counts, as for `python -m`; a console script leaves it out.
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), name)
    except Exception as error:
        raise ValueError(
            f"`clean --model {path}` cannot be imported ({type(error).__name__}: {error}): "
            "write a dotted path such as my_file.MyNetwork, with my_file.py in this folder or "
            "installed."
        ) from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not callable(found):
        raise ValueError(
            f"`clean --model {path}` is a {type(found).__name__}: it must be a class of a network, "
            "or a function that makes one."
        )
    return found  # type: ignore[no-any-return]


def _try(model: str, network: Network, inputs: Tensor, classes: int) -> None:
    try:
        made = network()
    except Exception as error:
        raise ValueError(
            f"`clean --model {model}` could not be made ({type(error).__name__}: {error}): it is "
            "called with those of the arguments inputs, channels, classes and num_classes that it "
            "has; all others need a default."
        ) from error
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"`clean --model {model}` makes a {type(made).__name__}: it must be a torch module."
        )
    if not any(parameter.requires_grad for parameter in made.parameters()):
        raise ValueError(
            f"`clean --model {model}` has no parameters to train: there must be at least one."
        )
    made.eval()
    shape = tuple(inputs.shape)
    try:
        with torch.no_grad():
            logits = made(inputs)
    except Exception as error:
        raise ValueError(
            f"`clean --model {model}` does not take inputs of shape {shape} "
            f"({type(error).__name__}: {error}): it must map them to one logit per class."
        ) from error
    found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if found != (len(inputs), classes):
        raise ValueError(
            f"`clean --model {model}` gives {found} for {len(inputs)} samples: with {classes} "
            f"classes it must be {(len(inputs), classes)}, one logit per class."
        )
