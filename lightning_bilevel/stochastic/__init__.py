"""Bilevel methods on mini-batches, by the user's torch optimisers and Lightning's strategies."""

from lightning_bilevel.stochastic.hypergradients import DARTS as DARTS
from lightning_bilevel.stochastic.hypergradients import SOBA as SOBA
from lightning_bilevel.stochastic.penalties import F2BA as F2BA
from lightning_bilevel.stochastic.penalties import F2SA as F2SA
from lightning_bilevel.stochastic.penalties import MEHA as MEHA
from lightning_bilevel.stochastic.penalties import VPBGD as VPBGD
from lightning_bilevel.stochastic.penalties import StreamingIVSP as StreamingIVSP
from lightning_bilevel.stochastic.step import Method as Method
