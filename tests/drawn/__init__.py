"""Programs drawn inside `fn` and around it, run by fzero and by plain torch, and compared.

`python -m drawn --seed 7` (in this folder's parent) shows a program and runs it.
"""

# the features enter themselves
from drawn import around, between, control, derivatives, effects, inplace, leaves, values  # noqa: F401
from drawn.drawing import from_seed as from_seed
from drawn.drawing import programs as programs
from drawn.language import FEATURES as FEATURES
from drawn.language import Action as Action
from drawn.language import Program as Program
from drawn.language import Statement as Statement
from drawn.write import listing as listing
