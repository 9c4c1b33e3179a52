"""IVSP as a torch optimizer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.ivsp.algorithm import IVSPMethod
from lightning_bilevel.solvers.ivsp.choose import choose
from lightning_bilevel.solvers.ivsp.constants import explain, safe_L
from lightning_bilevel.solvers.ivsp.state import State
from lightning_bilevel.solvers.parameters import read
from lightning_bilevel.solvers.theorem import TheoremPoint


class IVSP(BilevelOptimizer):
    r"""Inexact variable-smoothing penalty method.

    It solves the relaxed problem :math:`\min_{w \in C} f(w)` s.t. :math:`R(w) \le 0`, with the
    Moreau gap R of :mod:`lightning_bilevel.core.moreau`, by one projected-gradient step per
    iteration on a smoothed exact penalty. With :math:`w = (x, y)`, :math:`C = X \times Y` and
    :math:`\tilde z^k`, :math:`\tilde R^k` from an inexact evaluation:

    .. math::
        w_L &= P_C\bigl(w^k - \tfrac{\mu_k}{L} [\gamma_k \nabla f(w^k)
          + \phi'_{\mu_k}(\tilde R^k) \tilde\nabla R(w^k)]\bigr) \\
        \text{accept if}\quad \gamma_k f(w_L) &+ \phi_{\mu_k}(\tilde R_L + \zeta_{k+1})
          \le \gamma_k f(w^k) + \phi_{\mu_k}(\tilde R^k)
          - \tfrac{c_1}{2\mu_k}\|w_L - w^k\|^2 + \tau_{k,L} \\
        t_{k+1} &= t_k + 1 \quad\text{if } \tilde R^{k+1} > 2 a_\phi \mu_k
          \text{ and } \|w^{k+1} - w^k\| \le c_2\mu_k\gamma_k

    If a trial is rejected, L doubles. :math:`\tau_{k,L}` is the allowance for the inexact
    evaluation. The smoothing falls as :math:`\mu_k = \mu_0 (1 + \lfloor k/B \rfloor)^{-r}`, and the
    inverse penalty on a grid: :math:`\gamma_k = \gamma_0 (t_k + 1)^{-1/2}` with the paper's rules.
    The adaptive rules start at :math:`\gamma_0`, follow the multiplier and halve it by the test
    above. They do not double L but set it to the curvature that the rejected trial saw, and compare
    trials with an average of earlier merits (:mod:`lightning_bilevel.solvers.ivsp.adaptive`).

    Constraints :math:`c_i(w) \le 0` beside the lower level (``BilevelProblem(constraints=...)``, or
    a module's ``constraints``) are further residuals: :math:`\sum_i \phi_{\mu_k}(c_i)` is added to
    the penalty function, and the test of the penalty looks at the largest of :math:`\tilde R` and
    :math:`c_i`. Without a lower level (``lower=None``) this is the smoothing exact-penalty method
    sESQM for a single level, with exact evaluations. The theorem below is for R alone; for
    constraints beside it the method is our extension, and sESQM is known to us from its description
    in the paper.

    Assumption on g: g(x, .) is sigma-weakly convex (it may be nonconvex). Guarantee: an epsilon-KKT
    point of the relaxed problem in :math:`\tilde O(\epsilon^{-3})` first-order evaluations, if the
    constraint qualification ENNAMCQ holds. Cost of an iteration with J inner iterations and one
    trial: J gradients of g in y, one pass of g(x, y) - g(x, z) and one of f. With the paper's rules
    a rejected trial costs the same. With the adaptive ones a trial that its values of f and g
    already reject costs one pass of f, one gradient and one value of g, and any other trial one
    value of g more.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        rho: :math:`\rho`, the Moreau parameter; ``rho * sigma`` must be below 1.
        sigma: :math:`\sigma`, the weak-convexity modulus of g(x, .); 0 for a convex lower level.
        delta: :math:`\delta`, the relaxation, in the unit of g: the lower level ends nearly
            stationary up to :math:`O(\sqrt\delta)`.
        mu0: :math:`\mu_0`, the first smoothing.
        block: B, how many iterations share one smoothing:
            :math:`\mu_k = \mu_0 (1 + \lfloor k/B \rfloor)^{-r}`.
        r: The power by which the smoothing falls, between 0 and 1; 1/3 balances the rates.
        q: The power of the accuracy :math:`\zeta_k = \bar\zeta \mu_k^q`, above 1/r; None is 1/r +
            0.01.
        gamma0: :math:`\gamma_0`, the first inverse penalty.
        zeta_bar: :math:`\bar\zeta`, the scale of the accuracy.
        c1: :math:`c_1`, the decrease that the line search requires.
        c2: :math:`c_2`, how small a step must be before a remaining violation strengthens the
            penalty.
        L_init: :math:`L_{0,0}`, where the first line search starts.
        bb: Which Barzilai-Borwein step a line search starts from: ``"short"`` (the paper's), or
            ``"long"``, which takes longer steps if a few directions are much stiffer than the
            others. IVSP's choice is the long one as long as it is accepted at once.
        L_min: The smallest start of a line search.
        L_max: The largest start of a line search.
        L_xy: Lipschitz constant of :math:`\nabla_x g(x, \cdot)`.
        L_yy: Lipschitz constant of :math:`\nabla_y g(x, \cdot)`; the inner step is 1/(L_yy +
            1/rho).
        inner: How a Moreau evaluation is made: ``"gradient"`` (the paper's), or ``"accelerated"``,
            which needs about the square root of that many iterations if rho * L_yy is large. IVSP's
            choice is Barzilai-Borwein steps.
        B_R: Bound on the norm of the gradient of R.
        theta_low: :math:`\underline\vartheta`, the lower bound in the allowance :math:`\tau`.
        theta_hat: :math:`\hat\vartheta`, in (0, 2), the upper bound in the allowance, as a multiple
            of L.
        smoothing: The smoothed plus function, ``"huber"`` (centered Huber) or ``"softplus"``.
        fixed_L: A constant L instead of the line search (the paper's Strategy I), which needs no
            L_init. Descent is guaranteed only above :meth:`safe_L`, which the paper's theta_hat and
            B_R make larger than 1e8. A step that fails the test of the line search is taken, with
            one warning.
        max_trials: The cap on the trials of one line search.
        max_inner: The cap on the iterations of one Moreau evaluation.
        rules: ``"paper"`` is the paper's algorithm, which needs rho, sigma, mu0, block, gamma0,
            zeta_bar, L_init (or fixed_L), L_xy and L_yy; a missing one is an error. ``"own"``
            adapts to the run (:mod:`lightning_bilevel.solvers.ivsp.adaptive` says how). None is the
            paper's if all of these are given, and the adaptive ones otherwise.
        keep_proved: Whether the point of the theorem is kept, as :attr:`proved`. It costs the
            memory of two vectors (x, y) and no evaluation.

    A constant that is None is chosen at the first step, from a few gradients there
    (:mod:`lightning_bilevel.solvers.ivsp.choose` says how), and stays fixed afterwards, through
    checkpoints too. The paper's constants besides those per task are c1 = 1e-4, c2 = 1, L_min =
    1e-11, L_max = 1e11, B_R = 1000 and the short step.

    References:
        Alcantara, Inoue, Takeda: Improved KKT Complexity for First-Order Bilevel Optimization under
        Weak Lower-Level Convexity (Algorithms 1 to 3).
    """

    method_type: ClassVar[type[IVSPMethod]] = IVSPMethod
    method: IVSPMethod
    run: State | None

    @property
    def chosen(self) -> list[tuple[str, str]]:
        """The constants that this run has estimated, each with its value and its origin."""
        s = self.run
        return [] if s is None else explain(s.constants, s.estimated, s.own_unit)

    @property
    def envelope(self) -> Envelope | None:
        """The envelope in the user's y; None before the first step has estimated its constants."""
        c: Any = self.constants
        if c.rho is None or c.sigma is None:
            return None
        return Envelope(c.rho, c.sigma, c.delta).in_unit(self.param_groups[1]["unit"])

    @property
    def multiplier(self) -> float:
        """The multiplier of the last point."""
        return 0.0 if self.run is None else self.run.multiplier

    @property
    def proved(self) -> TheoremPoint | None:
        r"""The point that the theorem speaks of, after the iterations so far.

        It is of the second half of the run, of an iteration that did not update the penalty and
        has the smallest :math:`\omega_{k+1} = \|w^{k+1} - w^k\|/\mu_k` of the last iterations, of
        more than half of the second half (:mod:`lightning_bilevel.solvers.theorem` says which, and
        why the theorem's rates hold for it). The last iterate may be better or worse: nothing
        is proved for it. None if there is no such point; :attr:`unproved` then says why.
        """
        return None if self.run is None else self.run.theorem.best(self.run.k)

    @property
    def unproved(self) -> str:
        """Why :attr:`proved` is None, in words."""
        if not self.method.keep_proved:
            return "`IVSP(keep_proved=False)` does not keep the point of its theorem"
        if self.run is not None and self.run.theorem.was_changed(self.run.k):
            return (
                f"the theorem is about one problem and a run that was not touched, but f, g or the "
                f"point changed after iteration {self.run.theorem.changed} of {self.run.k}: give "
                "all iterations the same data, or run as long again"
            )
        return "no recent iteration was on all data and left the penalty alone: run longer"

    @torch.no_grad()
    def probe(self, problem: BilevelProblem) -> list[tuple[str, str]]:
        """Return the constants that a run from here would estimate, with values and origins."""
        groups, given = self.param_groups, self.method
        units = groups[0]["unit"], groups[1]["unit"]
        c, unit = choose(problem, *read(groups, problem), given, units)
        return explain(c, given.missing, unit)

    def safe_L(
        self, L_f: float = 0.0, L_R: float = 0.0, *, theta_hat: float | None = None
    ) -> float:
        r"""Return :math:`L_{\text{safe}}`: every step with an L above it descends.

        :func:`~lightning_bilevel.solvers.ivsp.constants.safe_L` has the formula. A constant that
        IVSP estimates is known after the first step. With L_f = L_R = 0 the result is only a lower
        bound.
        """
        c: Any = self.constants
        seen = 0.0 if self.run is None else self.run.B_R
        return safe_L(c, seen, L_f, L_R, theta_hat)
