"""Optimizers in optax's shape, one a file; see `fzero/table/optimizer.py` for the protocol."""

from fzero.optim._adafactor import AdafactorState as AdafactorState
from fzero.optim._adafactor import adafactor as adafactor
from fzero.optim._adam import AdamState as AdamState
from fzero.optim._adam import AmsgradState as AmsgradState
from fzero.optim._adam import adam as adam
from fzero.optim._adam import adamw as adamw
from fzero.optim._clip import adaptive_clip as adaptive_clip
from fzero.optim._clip import clip_by_block_norm as clip_by_block_norm
from fzero.optim._clip import clip_by_global_norm as clip_by_global_norm
from fzero.optim._clip import clip_by_value as clip_by_value
from fzero.optim._join import chain as chain
from fzero.optim._join import partition as partition
from fzero.optim._lamb import lamb as lamb
from fzero.optim._lion import LionState as LionState
from fzero.optim._lion import lion as lion
from fzero.optim._muon import MuonState as MuonState
from fzero.optim._muon import muon as muon
from fzero.optim._schedules import constant as constant
from fzero.optim._schedules import linear as linear
from fzero.optim._schedules import warmup_cosine as warmup_cosine
from fzero.optim._sgd import SgdState as SgdState
from fzero.optim._sgd import sgd as sgd
from fzero.optim._whole import WholeState as WholeState
from fzero.optim._whole import whole as whole
from fzero.table.optimizer import GradientTransformation as GradientTransformation
