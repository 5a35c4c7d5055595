"""The geometry of features, and changes of features and the kernel."""

from jaxttp.representation.geometry import Geometry as Geometry
from jaxttp.representation.geometry import alpha_req as alpha_req
from jaxttp.representation.geometry import participation_ratio as participation_ratio
from jaxttp.representation.geometry import rankme as rankme
from jaxttp.representation.geometry import representation_geometry as representation_geometry
from jaxttp.representation.geometry import singular_values as singular_values
from jaxttp.representation.similarity import CKATable as CKATable
from jaxttp.representation.similarity import cka_table as cka_table
from jaxttp.representation.similarity import kernel_distance as kernel_distance
from jaxttp.representation.similarity import kernel_rate as kernel_rate
from jaxttp.representation.similarity import linear_cka as linear_cka
