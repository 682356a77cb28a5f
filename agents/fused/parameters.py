"""All parameters of a policy in one array, and their optimiser step in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class FlatParameters:
    """Parameters, gradients and Adam's moments as four flat tensors.

    The parameters stay those of the policy, and the moments those of its optimiser: both become
    views of the flat tensors, so that saving, loading and the plain path go on with the same state.

    Args:
        parameters: What is trained, in the order in which it lies in the flat tensors.
        optimizer: The policy's.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Adam
    ) -> None:
        self.parameters = list(parameters)
        self.optimizer = optimizer
        self.offsets = [0]
        for parameter in self.parameters:
            self.offsets.append(self.offsets[-1] + parameter.numel())
        size = self.offsets[-1]
        self.values, self.gradients, first, second = (
            torch.zeros(size, dtype=torch.float32) for _ in range(4)
        )
        self._moments = {"exp_avg": first, "exp_avg_sq": second}
        self._step = torch.zeros((), dtype=torch.float32)
        indices = range(len(self.parameters))
        self._value_views = [self.view(self.values, index) for index in indices]
        self._gradient_views = [self.view(self.gradients, index) for index in indices]
        self._moment_views = {
            name: [self.view(moment, index) for index in indices]
            for name, moment in self._moments.items()
        }
        self.attach()

    def attach(self) -> None:
        """Takes the policy's parameters as they are now, wherever they were moved to."""
        for parameter, view in zip(self.parameters, self._value_views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view

    def attach_optimizer(self) -> None:
        """Takes the optimiser's moments as they are now, and gives it the gradients."""
        for parameter, view in zip(self.parameters, self._gradient_views, strict=True):
            parameter.grad = view
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        self._step.copy_(torch.as_tensor(states[0].get("step", 0.0)))
        for name, views in self._moment_views.items():
            for state, view in zip(states, views, strict=True):
                if state.get(name) is not view:
                    view.copy_(state[name]) if name in state else view.zero_()
                    state[name] = view

    def addresses(self) -> tuple[int, int]:
        """Returns where the parameters and the gradients lie in memory."""
        return self.values.data_ptr(), self.gradients.data_ptr()

    def steps_agree(self) -> bool:
        """Whether Adam has taken as many steps for each parameter, as one array needs."""
        states = (self.optimizer.state.get(parameter) for parameter in self.parameters)
        return len({float(state["step"]) if state else 0.0 for state in states}) == 1

    def view(self, flat: torch.Tensor, first: int, count: int = 1) -> torch.Tensor:
        """Returns parameters first, first + 1, ..., all of the same shape, as one tensor.

        Args:
            flat: One of the flat tensors.
            first: Index of the first parameter.
            count: How many; more than one gives a leading dimension (count, ...).
        """
        shape = self.parameters[first].shape
        part = flat[self.offsets[first] : self.offsets[first + count]]
        return part.view(shape) if count == 1 else part.view(count, *shape)

    def step(self, max_grad_norm: float) -> float:
        """Clips the gradients to a norm, takes a step of Adam, and returns the norm before."""
        norm = float(torch.linalg.vector_norm(self.gradients))
        if (factor := max_grad_norm / (norm + 1e-6)) < 1:
            self.gradients.mul_(factor)
        group = self.optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        # What `torch.optim.Adam(fused=True)` calls, without its care for many parameters.
        torch._fused_adam_(
            [self.values],
            [self.gradients],
            [self._moments["exp_avg"]],
            [self._moments["exp_avg_sq"]],
            [],
            [self._step.add_(1)],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
        return norm

    def detach_optimizer(self) -> None:
        """Gives the optimiser its count of steps back."""
        for parameter in self.parameters:
            self.optimizer.state[parameter]["step"] = self._step.clone()
