"""Choosing tokens from logits. Pure: numpy in, tokens out; the random number of a draw is a function of its place.

Order of the steps, as in vLLM: stop tokens barred -> penalties -> temperature -> min_p -> top_k -> top_p -> draw.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.api import Draw, Sampled, Sampling

Floats = npt.NDArray[np.floating]

LOGPROB_MIN = -9999.0
"""Reported in place of minus infinity and of everything below, which JSON cannot say or nobody can use."""

TEMPERATURE_MIN = 1e-6
"""Below it a draw is greedy in all but name, and dividing by it would overflow."""

NUCLEUS_FIRST = 256
"""How many of the likeliest tokens `top_p` looks at before it sorts the whole vocabulary, which is slow."""


def sample(logits: Floats, draw: Draw) -> Sampled:
    """One token for one draw, from float32 logits [vocab]. Raises FloatingPointError if they are not finite."""
    if not np.isfinite(logits.max()):
        raise FloatingPointError("the model's logits are not finite")
    sampling = draw.sampling
    scores = _penalised(logits, draw)
    if sampling.temperature <= 0:
        token = int(scores.argmax())
    else:
        token = _drawn(scores, sampling, position=len(draw.prompt) + len(draw.output))
    if sampling.logprobs is None:
        return Sampled(token)
    return _with_logprobs(logits, token, sampling.logprobs)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one position of one request: the same in every process."""
    return float(np.random.Generator(np.random.Philox(key=seed % (1 << 64), counter=position)).random())


def _penalised(logits: Floats, draw: Draw) -> Floats:
    """Logits after stop tokens are barred and penalties taken; the input itself where there are none."""
    sampling = draw.sampling
    bars = len(draw.output) < sampling.min_tokens and bool(sampling.stop_tokens)
    counts_output = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    if not (bars or counts_output or sampling.repetition_penalty != 1):
        return logits
    scores = logits.copy()
    if bars:
        scores[sampling.stop_tokens] = -np.inf
    if sampling.repetition_penalty != 1:
        said = np.union1d(_ids(draw.prompt), _ids(draw.output))
        held = scores[said]
        scores[said] = np.where(held > 0, held / sampling.repetition_penalty, held * sampling.repetition_penalty)
    if counts_output:
        said, counts = np.unique(_ids(draw.output), return_counts=True)
        scores[said] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return scores


def _ids(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.asarray(tokens, dtype=np.int64)


def _drawn(scores: Floats, sampling: Sampling, position: int) -> int:
    """A token at random: inverse distribution function, over the tokens that the limits leave."""
    kept, weights = _kept(scores, sampling)
    sums = np.cumsum(weights)
    place = np.searchsorted(sums, uniform(sampling.seed, position) * sums[-1], side="right")
    return int(kept[min(int(place), len(kept) - 1)])


def _kept(scores: Floats, sampling: Sampling) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The tokens that min_p, top_k and top_p leave, and their unnormalised probabilities, in a fixed order."""
    temperature = max(sampling.temperature, TEMPERATURE_MIN)
    weights = np.exp((scores.astype(np.float64) - scores.max()) / temperature)  # the likeliest has 1
    kept = np.flatnonzero(weights >= sampling.min_p) if sampling.min_p > 0 else np.arange(len(weights))
    if 0 < sampling.top_k < len(kept):
        kept = _likeliest(kept, weights, sampling.top_k)
    if sampling.top_p < 1:
        kept = _nucleus(kept, weights, sampling.top_p)
    return kept, weights[kept]


def _likeliest(kept: npt.NDArray[np.int64], weights: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """The `count` likeliest of `kept`, likeliest first, equal ones by id."""
    if count < len(kept):
        # Everything at least as likely as the last one in, so that ties at the border go by id as well.
        border = np.partition(weights[kept], len(kept) - count)[len(kept) - count]
        kept = kept[weights[kept] >= border]
    return kept[np.lexsort((kept, -weights[kept]))][:count]


def _nucleus(kept: npt.NDArray[np.int64], weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.int64]:
    """The fewest likeliest tokens of `kept` whose probabilities reach `top_p`; at least one."""
    wanted = top_p * weights[kept].sum()
    for count in (NUCLEUS_FIRST, len(kept)):
        first = _likeliest(kept, weights, count)
        sums = np.cumsum(weights[first])
        if sums[-1] >= wanted:
            return first[: int(np.searchsorted(sums, wanted)) + 1]
    return first  # rounding kept the sum of all just below


def _with_logprobs(logits: Floats, token: int, count: int) -> Sampled:
    """The token with its logprob and those of the `count` likeliest tokens, of the model's own distribution."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    logprobs = np.maximum(wide - np.log(np.exp(wide).sum()), LOGPROB_MIN)
    top = _likeliest(np.arange(len(wide)), logprobs, count) if count else np.arange(0)
    return Sampled(token, float(logprobs[token]), top.tolist(), logprobs[top].tolist())
