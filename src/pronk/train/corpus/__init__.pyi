from pronk.train.corpus.sources import SourceSpec as SourceSpec
from pronk.train.corpus.sources import read_source as read_source
from pronk.train.corpus.sources import spec_of as spec_of
