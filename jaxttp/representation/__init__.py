"""What features look like, how they change, and how far the weights have moved."""

from jaxttp.representation.measures import Geometry as Geometry
from jaxttp.representation.measures import alpha_req as alpha_req
from jaxttp.representation.measures import participation_ratio as participation_ratio
from jaxttp.representation.measures import rankme as rankme
from jaxttp.representation.measures import representation_geometry as representation_geometry
from jaxttp.representation.measures import singular_value_trajectory as singular_value_trajectory
from jaxttp.representation.moments import FeatureMoments as FeatureMoments
from jaxttp.representation.moments import feature_moments as feature_moments
from jaxttp.representation.moments import init_moments as init_moments
from jaxttp.representation.moments import merge_moments as merge_moments
from jaxttp.representation.moments import singular_values as singular_values
from jaxttp.representation.moments import update_moments as update_moments
from jaxttp.representation.similarity import CKATable as CKATable
from jaxttp.representation.similarity import cka_table as cka_table
from jaxttp.representation.similarity import kernel_distance as kernel_distance
from jaxttp.representation.similarity import kernel_rate as kernel_rate
from jaxttp.representation.similarity import linear_cka as linear_cka
from jaxttp.representation.weights import WeightPath as WeightPath
from jaxttp.representation.weights import weight_cosine as weight_cosine
from jaxttp.representation.weights import weight_norm as weight_norm
from jaxttp.representation.weights import weight_path as weight_path
