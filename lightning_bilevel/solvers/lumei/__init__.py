"""Lu and Mei's penalty method by minimax steps: the solver, and its saddle-point subsolver."""

from lightning_bilevel.solvers.lumei.solver import LuMei as LuMei
