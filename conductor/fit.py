"""A line through what was measured, kept up to date sample by sample. Pure, and plain floats.

    time = a0*x0 + a1*x1 + a2*x2        every x is given and >= 0, every a is wanted and >= 0

Least squares in information form: of all samples only the 3 x 3 matrix of the normal equations and its right side
are kept, which is what recursive least squares keeps, but without an inverse that could blow up.

- Relative errors count, so that a step of 10 ms and a chunk of 3 s are both foretold well: each sample is divided
  by what was predicted for it.
- Each coefficient is taken relative to a prior one, so the numbers are near 1 whatever the machine. The prior says
  how the coefficients stand to each other; how fast the machine is comes from the samples. What they do not
  determine stays there (a ridge penalty), so one sample already gives a whole line.
- Old samples are forgotten only where new ones speak (directional forgetting: Cao and Schwartz, "A directional
  forgetting algorithm based on the decomposition of the information matrix", Automatica 36, 2000). An instance
  that runs one request for hours does not unlearn what a full batch costs, and the matrix stays bounded.
- A time far from its prediction is pulled towards it before it is learned (Huber's clipping): a process that was
  paused moves the line little. The band widens while samples keep falling outside: a lasting change gets through,
  and while it is that wide everything old is forgotten faster.
"""

from collections import deque
from statistics import median

Three = tuple[float, float, float]

MEMORY = 100
"""Samples that are remembered, about, in each direction: noise of a tenth leaves an error of a hundredth."""

RIDGE = 0.01
"""Weight of the prior, in samples: measured times scatter by about 0.1, the ratios of the prior by about 1, and
0.1 ** 2 / 1 ** 2 is the ratio of the variances."""

ROUNDING = 1e-9
"""The prior weighs at least this share of all samples: with less, rounding could leave no solution."""

LATEST = 15
"""Samples whose median says how fast the machine is against the prior: seven odd ones do not move it far."""

WARM = 8
"""Samples until the line is trusted enough to call a sample odd."""

CLIP = 3.0
"""A sample further from its prediction than so many mean deviations is pulled back to there."""

DEVIATION_FIRST = 0.25
"""Mean relative error assumed at first."""

DEVIATION_MIN = 0.02
"""The clock and the machine are no better than that."""

DEVIATION_STEP = 0.05
"""Weight of one sample in the mean deviation. While all samples are clipped it grows by 0.05 * (3 - 1) of itself
with each: a machine that has become three times slower is believed after about 20."""

SURPRISE = 0.25
"""A mean deviation above this is no noise: the machine is another now, and all that is remembered is doubted."""

DOUBT = 0.1
"""Share of everything remembered that a sample then takes away, times the mean deviation beyond SURPRISE."""

SOLVE_EVERY = 8
"""Samples between two solutions while learning: the line hardly moves within fewer, and solving costs the most."""


class Fit:
    """One such line. `prior` are the coefficients assumed, each > 0. Mutates: learn, coefficients (a cache)."""

    def __init__(self, prior: Three) -> None:
        assert min(prior) > 0
        self.samples = 0
        """Learned so far."""
        self._prior = prior
        self._latest: deque[float] = deque(maxlen=LATEST)
        # The upper triangle of the information matrix, its right side, and the solution relative to the prior.
        self._a00 = self._a01 = self._a02 = self._a11 = self._a12 = self._a22 = 0.0
        self._b0 = self._b1 = self._b2 = 0.0
        self._u: Three = (1.0, 1.0, 1.0)
        self._solved = True
        self._deviation = DEVIATION_FIRST

    def learn(self, x: Three, seconds: float) -> None:
        """One sample: features `x` >= 0, the first of them > 0, took `seconds` > 0."""
        w0, w1, w2 = x[0] * self._prior[0], x[1] * self._prior[1], x[2] * self._prior[2]
        self._latest.append(seconds / (w0 + w1 + w2))
        if self.samples == 0:
            self._u = (self._latest[0],) * 3
        u0, u1, u2 = self._u
        guess = u0 * w0 + u1 * w1 + u2 * w2
        if guess <= 0.0:  # only where every feature that is not 0 has the coefficient 0
            guess = seconds
        ratio = self._believed(seconds / guess)
        if self._deviation > SURPRISE:
            self._scale(1.0 - min(DOUBT * (self._deviation - SURPRISE), DOUBT))
        self._forget_and_add(w0 / guess, w1 / guess, w2 / guess, ratio)
        self.samples += 1
        self._solved = False
        if self.samples < WARM or self.samples % SOLVE_EVERY == 0:
            self._solve()

    def coefficients(self) -> Three:
        """a0, a1, a2: all >= 0, so no prediction is below 0 or falls when a feature grows."""
        if not self._solved:
            self._solve()
        u, prior = self._u, self._prior
        return u[0] * prior[0], u[1] * prior[1], u[2] * prior[2]

    def _believed(self, ratio: float) -> float:
        """A measured time over its prediction, clipped to the band of what is usual; moves the band."""
        if self.samples >= WARM:
            limit = 1.0 + CLIP * self._deviation
            ratio = min(max(ratio, 1.0 / limit), limit)
            self._deviation += DEVIATION_STEP * (abs(ratio - 1.0) - self._deviation)
            self._deviation = max(self._deviation, DEVIATION_MIN)
        return ratio

    def _scale(self, factor: float) -> None:
        """Let all earlier samples weigh less; what they say stays."""
        self._a00, self._a01, self._a02 = factor * self._a00, factor * self._a01, factor * self._a02
        self._a11, self._a12, self._a22 = factor * self._a11, factor * self._a12, factor * self._a22
        self._b0, self._b1, self._b2 = factor * self._b0, factor * self._b1, factor * self._b2

    def _forget_and_add(self, z0: float, z1: float, z2: float, ratio: float) -> None:
        """A -= (A z)(A z)' / (z' A z) / MEMORY, and b so that the solution stays; then the sample is added.

        Written out: this runs for every pass of every instance.
        """
        g0 = self._a00 * z0 + self._a01 * z1 + self._a02 * z2
        g1 = self._a01 * z0 + self._a11 * z1 + self._a12 * z2
        g2 = self._a02 * z0 + self._a12 * z1 + self._a22 * z2
        known = z0 * g0 + z1 * g1 + z2 * g2
        share = 1.0 / (MEMORY * known) if known > 0.0 else 0.0
        said = share * (z0 * self._b0 + z1 * self._b1 + z2 * self._b2)
        self._a00 += z0 * z0 - share * g0 * g0
        self._a01 += z0 * z1 - share * g0 * g1
        self._a02 += z0 * z2 - share * g0 * g2
        self._a11 += z1 * z1 - share * g1 * g1
        self._a12 += z1 * z2 - share * g1 * g2
        self._a22 += z2 * z2 - share * g2 * g2
        self._b0 += z0 * ratio - said * g0
        self._b1 += z1 * ratio - said * g1
        self._b2 += z2 * ratio - said * g2

    def _solve(self) -> None:
        """Minimise the squares plus RIDGE * sum((u / speed - 1) ** 2), without coefficients below 0."""
        speed = median(self._latest)
        ridge = max(RIDGE / speed**2, ROUNDING * (self._a00 + self._a11 + self._a22))
        pull = ridge * speed
        matrix = [
            [self._a00 + ridge, self._a01, self._a02],
            [self._a01, self._a11 + ridge, self._a12],
            [self._a02, self._a12, self._a22 + ridge],
        ]
        self._u = _not_negative(matrix, [self._b0 + pull, self._b1 + pull, self._b2 + pull])
        self._solved = True


def _not_negative(matrix: list[list[float]], right: list[float]) -> Three:
    """Solve, and again without the unknown that is furthest below 0 (it is 0 then), until none is."""
    free = [0, 1, 2]
    while True:
        found = _solution([[matrix[i][j] for j in free] for i in free], [right[i] for i in free])
        worst = min(range(len(free)), key=found.__getitem__)
        if found[worst] >= 0.0 or len(free) == 1:
            break
        del free[worst]
    values = dict(zip(free, found, strict=True))
    return max(values.get(0, 0.0), 0.0), max(values.get(1, 0.0), 0.0), max(values.get(2, 0.0), 0.0)


def _solution(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination; the matrix is positive definite, so no pivot is 0. Both arguments are used up."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            for k in range(i + 1, size):
                matrix[j][k] -= factor * matrix[i][k]
            right[j] -= factor * right[i]
    for i in reversed(range(size)):
        right[i] = (right[i] - sum(matrix[i][k] * right[k] for k in range(i + 1, size))) / matrix[i][i]
    return right
