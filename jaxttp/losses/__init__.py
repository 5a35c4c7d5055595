"""Losses as functions of the outputs; labels and their weights; the times of loss curves."""

from jaxttp.losses.functions import Loss as Loss
from jaxttp.losses.functions import binary_cross_entropy as binary_cross_entropy
from jaxttp.losses.functions import cross_entropy as cross_entropy
from jaxttp.losses.functions import get_loss as get_loss
from jaxttp.losses.functions import misclassified as misclassified
from jaxttp.losses.functions import squared_error as squared_error
from jaxttp.losses.functions import unexplained_variance as unexplained_variance
from jaxttp.losses.functions import wrong_bits as wrong_bits
from jaxttp.losses.rule import Rule as Rule
from jaxttp.losses.rule import Target as Target
from jaxttp.losses.rule import early_stopping as early_stopping
from jaxttp.losses.rule import smooth_curve as smooth_curve
from jaxttp.losses.rule import training_time as training_time
from jaxttp.losses.targets import Weighted as Weighted
from jaxttp.losses.targets import encode_targets as encode_targets
from jaxttp.losses.targets import weighted as weighted
from jaxttp.losses.tokens import label_words as label_words
from jaxttp.losses.tokens import sample_tokens as sample_tokens
