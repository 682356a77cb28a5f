"""The update and the actions of a small actor-critic network without autograd's overhead.

An MLP on CartPole is so small that the framework's bookkeeping costs more than its arithmetic. Here
the gradients are written out, all parameters lie in one array, and a rollout asks only for actions.
The numbers are those of the plain path, `agents.updates.AutogradUpdate`, to rounding.
"""

from agents.fused.actor_critic import Actor, FusedActorCritic
from agents.fused.support import is_supported
from agents.fused.threads import as_many_threads_as_pay
from agents.fused.update import FusedUpdate

__all__ = ["Actor", "FusedActorCritic", "FusedUpdate", "as_many_threads_as_pay", "is_supported"]
