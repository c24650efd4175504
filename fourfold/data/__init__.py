"""Token data: readers of three formats, samples, and batches as a function of the step."""

from fourfold.data.datasets import TokenDataset
from fourfold.data.loader import Batch, Loader
from fourfold.data.mixture import Mixture
from fourfold.data.readers import open_datasets
from fourfold.data.samples import Samples, SampleSpec

__all__ = ["Batch", "Loader", "Mixture", "SampleSpec", "Samples", "TokenDataset", "open_datasets"]
