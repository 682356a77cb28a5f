"""The hidden layers of actor and critic, forward and backward, as batched matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agents.fused.heads import Array
from agents.fused.parameters import FlatParameters

_MAX_BUFFERS = 8  # pieces of a rollout, mini-batches, the last of each, and a few of any size
_aten = torch.ops.aten


def _tanh_backward(gradient: torch.Tensor, output: torch.Tensor) -> None:
    _aten.tanh_backward.grad_input(gradient, output, grad_input=gradient)


def _relu_backward(gradient: torch.Tensor, output: torch.Tensor) -> None:
    _aten.threshold_backward.grad_input(gradient, output, 0, grad_input=gradient)


# In place: what the activation does to a layer's output, and its derivative to a gradient.
ACTIVATIONS = {
    torch.nn.Tanh: (torch.tanh_, _tanh_backward),
    torch.nn.ReLU: (torch.relu_, _relu_backward),
}


class Towers:
    """S stacks of equal hidden layers over the same input, computed side by side.

    Args:
        layers: The linear layers of each tower, S sequences of L.
        activation: Class of the activation after every layer.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[torch.nn.Linear]],
        activation: type[torch.nn.Module],
    ) -> None:
        self.count = len(layers)
        self.layers = list(zip(*layers, strict=True))
        self.activate, self.activate_backward = ACTIVATIONS[activation]
        self._buffers: dict[int, _Buffers] = {}

    def parameters(self) -> list[torch.nn.Parameter]:
        """Returns the parameters in the order in which `attach` expects them."""
        found: list[torch.nn.Parameter] = []
        for level in self.layers:
            found += [layer.weight for layer in level] + [layer.bias for layer in level]
        return found

    def attach(self, flat: FlatParameters, first: int) -> None:
        """Takes weights and gradients from the flat tensors, `first` being its first parameter."""
        self.weights: list[torch.Tensor] = []
        self.biases: list[torch.Tensor] = []
        self.weight_gradients: list[torch.Tensor] = []
        self.bias_gradients: list[torch.Tensor] = []
        for level in range(len(self.layers)):
            index = first + 2 * self.count * level
            for tensors, source in (
                (self.weights, flat.values),
                (self.weight_gradients, flat.gradients),
            ):
                view = flat.view(source, index, self.count)
                tensors.append(view.view(self.count, *view.shape[-2:]))
            for tensors, source in (
                (self.biases, flat.values),
                (self.bias_gradients, flat.gradients),
            ):
                view = flat.view(source, index + self.count, self.count)
                tensors.append(view.view(self.count, 1, view.shape[-1]))

    def forward(self, inputs: torch.Tensor) -> Array:
        """Returns the last hidden layer, (S, B, H), of inputs (B, D); overwritten by the next."""
        if len(inputs) not in self._buffers:
            if len(self._buffers) == _MAX_BUFFERS:
                self._buffers.pop(next(iter(self._buffers)))
            self._buffers[len(inputs)] = _Buffers(self.weights, len(inputs))
        self._buffer = buffer = self._buffers[len(inputs)]
        self._inputs = hidden = inputs.expand(self.count, *inputs.shape)
        for weight, bias, output in zip(self.weights, self.biases, buffer.outputs, strict=True):
            torch.bmm(hidden, weight.mT, out=output)
            hidden = self.activate(output.add_(bias))
        return buffer.last_output

    @property
    def output_gradient(self) -> Array:
        """Where the gradient of the last `forward` is to be written for `backward`, (S, B, H)."""
        return self._buffer.last_gradient

    def backward(self) -> None:
        """Writes the gradients of weights and biases."""
        outputs, gradients = self._buffer.outputs, self._buffer.gradients
        for level in reversed(range(len(self.weights))):
            gradient = gradients[level]
            self.activate_backward(gradient, outputs[level])
            below = outputs[level - 1] if level else self._inputs
            torch.bmm(gradient.mT, below, out=self.weight_gradients[level])
            # A product with ones is the faster sum over so few columns.
            torch.bmm(self._buffer.ones, gradient, out=self.bias_gradients[level])
            if level:
                torch.bmm(gradient, self.weights[level], out=gradients[level - 1])


class _Buffers:
    """Outputs and gradients of every layer for a number of rows, allocated once."""

    def __init__(self, weights: Sequence[torch.Tensor], rows: int) -> None:
        shapes = [(len(weight), rows, weight.shape[1]) for weight in weights]
        self.outputs = [torch.empty(shape) for shape in shapes]
        self.gradients = [torch.empty(shape) for shape in shapes]
        self.ones = torch.ones(len(weights[0]), 1, rows)
        self.last_output: Array = self.outputs[-1].numpy()
        self.last_gradient: Array = self.gradients[-1].numpy()
