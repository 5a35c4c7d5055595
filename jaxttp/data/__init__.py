"""Named data sets as NumPy arrays, and parts of them."""

from jaxttp.data.dataset import Dataset as Dataset
from jaxttp.data.dataset import Split as Split
from jaxttp.data.dataset import select as select
from jaxttp.data.dataset import split as split
from jaxttp.data.images import Preprocessing as Preprocessing
from jaxttp.data.images import imagenet_preprocessing as imagenet_preprocessing
from jaxttp.data.images import preprocess as preprocess
from jaxttp.data.images import vit_preprocessing as vit_preprocessing
from jaxttp.data.registry import dataset_names as dataset_names
from jaxttp.data.registry import load_dataset as load_dataset
from jaxttp.data.tables import is_table as is_table
from jaxttp.data.tables import load_table as load_table
from jaxttp.data.tables import load_whole as load_whole
from jaxttp.data.text import Corpus as Corpus
from jaxttp.data.text import Tokenizer as Tokenizer
from jaxttp.data.text import has_texts as has_texts
from jaxttp.data.text import load_corpus as load_corpus
from jaxttp.data.text import load_texts as load_texts
from jaxttp.data.text import load_tokenizer as load_tokenizer
