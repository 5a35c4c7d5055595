"""The empirical neural tangent kernel of any network, and nothing that moves."""

from jaxttp.ntk.gram import empirical_ntk as empirical_ntk
