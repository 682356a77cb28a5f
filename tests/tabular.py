"""A random tabular instance of text generation, small enough to enumerate every completion.

Vocabulary 3, token 0 ends the completion, at most 4 tokens: 31 completions, 15 states. All is in
float64, so that what is exact shows as exact.
"""

import itertools

import torch

VOCAB_SIZE, HORIZON, EOS = 3, 4, 0


class TabularText:
    """Rewards, reference and β of one instance; policies are logits, (states, vocabulary).

    Attributes:
        tokens: Every completion, int64 (n, T).
        mask: Its tokens, bool (n, T).
        states: Row of the logits that each token is drawn from, int64 (n, T).
        rewards: Reward of each completion R(y), (n,).
    """

    def __init__(self, seed=0, beta=0.3):
        self.beta = beta
        completions = []
        for length in range(1, HORIZON + 1):
            for tokens in itertools.product(range(VOCAB_SIZE), repeat=length):
                ended = tokens[-1] == EOS or length == HORIZON
                if ended and EOS not in tokens[:-1]:
                    completions.append(tokens)
        rows = {}
        shape = (len(completions), HORIZON)
        self.tokens = torch.zeros(shape, dtype=torch.int64)
        self.mask = torch.zeros(shape, dtype=torch.bool)
        self.states = torch.zeros(shape, dtype=torch.int64)
        for i, tokens in enumerate(completions):
            for t, token in enumerate(tokens):
                self.tokens[i, t] = token
                self.mask[i, t] = True
                self.states[i, t] = rows.setdefault(tokens[:t], len(rows))
        generator = torch.Generator().manual_seed(seed)

        def normal(*size):
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        self.rewards = normal(len(completions))
        self.ref_logits = normal(len(rows), VOCAB_SIZE)
        self.initial_logits = normal(len(rows), VOCAB_SIZE)
        self.ref_logprobs = self.logprobs(self.ref_logits)

    def logprobs(self, logits):
        """log π of every token of every completion, (n, T), 0 outside the mask."""
        chosen = torch.log_softmax(logits, -1)[self.states, self.tokens]
        return torch.where(self.mask, chosen, 0.0)

    def probabilities(self, logits):
        """π(y) of every completion, (n,)."""
        return self.logprobs(logits).sum(1).exp()

    def objective(self, logits):
        """J = E[R] − β·KL(π‖π_ref), by enumeration."""
        logprobs = self.logprobs(logits)
        divergence = (logprobs - self.ref_logprobs).sum(1)
        return (logprobs.sum(1).exp() * (self.rewards - self.beta * divergence)).sum()

    def gradient(self, function, logits=None):
        """∇ of a function of the logits, by default at the initial policy."""
        logits = self.initial_logits if logits is None else logits
        logits = logits.clone().requires_grad_()
        function(logits).backward()
        return logits.grad

    def optimum(self):
        """π*(y) ∝ π_ref(y)·exp(R(y)/β), (n,), and J* = β·log Σ_y π_ref(y)·exp(R(y)/β)."""
        scores = self.ref_logprobs.sum(1) + self.rewards / self.beta
        return torch.softmax(scores, 0), self.beta * torch.logsumexp(scores, 0)

    def task_rewards(self):
        """R(y) at the last token of each completion, (n, T)."""
        last = self.mask.sum(1) - 1
        at_end = torch.arange(HORIZON) == last[:, None]
        return torch.where(at_end, self.rewards[:, None], 0.0)

    def kl_per_state(self, logits, reverse=False):
        """KL(π‖π_ref) at each token's state, or KL(π_ref‖π), (n, T)."""
        log_p, log_q = torch.log_softmax(logits, -1), torch.log_softmax(self.ref_logits, -1)
        if reverse:
            log_p, log_q = log_q, log_p
        divergences = (log_p.exp() * (log_p - log_q)).sum(-1)
        return torch.where(self.mask, divergences[self.states], 0.0)

    def sample(self, logits, size, generator):
        """Rows of sampled completions, int64 (size,)."""
        weights = self.probabilities(logits.detach())
        return torch.multinomial(weights, size, replacement=True, generator=generator)
