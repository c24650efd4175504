"""Token data: readers of three formats, samples, and batches as a function of the step."""

from fourfold.data.dataset import TokenDataset
from fourfold.data.discovery import open_datasets
from fourfold.data.loader import Batch, Loader
from fourfold.data.mixture import Mixture
from fourfold.data.samples import Samples

__all__ = ["Batch", "Loader", "Mixture", "Samples", "TokenDataset", "open_datasets"]
