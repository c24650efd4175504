"""Token data as training reads it: batches as a function of the step.

    datasets          documents of token ids, and the table of file formats
    readers, npy      the files of each format, found and validated
    cache             results kept on disk under a hash of their inputs
    index             which tokens make up which sample, in which order
    samples, mixture  samples of one source, or of several by weight
    splits            the train, valid and test data a configuration names
    tokenizer_check   whether data, tokenizer, model and checkpoint belong together
    loader            batches

Tools that write, inspect and rewrite token files are in `fourfold.tools`.
"""

from fourfold.data.datasets import TokenDataset
from fourfold.data.loader import Batch, Loader
from fourfold.data.mixture import Mixture
from fourfold.data.readers import open_datasets
from fourfold.data.samples import Samples, SampleSpec

__all__ = ["Batch", "Loader", "Mixture", "SampleSpec", "Samples", "TokenDataset", "open_datasets"]
