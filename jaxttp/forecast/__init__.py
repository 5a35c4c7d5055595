"""How long will training take?"""

from jaxttp.forecast.crossing import training_time as training_time
from jaxttp.forecast.predict import predict_training_time as predict_training_time
from jaxttp.forecast.prediction import Cost as Cost
from jaxttp.forecast.prediction import Prediction as Prediction
