"""The image processor that a Kimi-K2.5 checkpoint brings for vLLM up to 0.17, which loads it as remote code.

Our own stand-in for the tiny pair, with the methods that this vLLM calls. It scales an image down to the limit of one
side and fits it to whole merged patches.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor


class KimiK25VisionProcessor(BaseImageProcessor):
    """Images and video chunks as patches of (3, patch_size, patch_size), and the grid of each."""

    def __init__(self, media_proc_cfg: dict | None = None, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg
        self.num_frames_per_chunk = media_proc_cfg["temporal_merge_kernel_size"]

    def grid(self, image) -> tuple[int, int]:
        """Rows and columns of patches, each a multiple of merge_kernel_size."""
        patch, merge = self.media_proc_cfg["patch_size"], self.media_proc_cfg["merge_kernel_size"]
        limit = self.media_proc_cfg["patch_limit_on_one_side"] * patch
        scale = min(1.0, limit / max(image.size))
        columns, rows = (merge * max(1, math.ceil(side * scale / (patch * merge))) for side in image.size)
        return rows, columns

    def media_tokens_calculator(self, media: dict) -> int:
        """How many tokens one medium takes: one a merged patch; frames are pooled over time."""
        rows, columns = self.grid(frames(media)[0])
        return rows * columns // self.media_proc_cfg["merge_kernel_size"] ** 2

    def preprocess(self, medias: list[dict]) -> BatchFeature:
        """pixel_values (patches, 3, patch_size, patch_size) in -1..1; grid_thws (media, 3): frames, rows, columns."""
        patch = self.media_proc_cfg["patch_size"]
        pixels, grids = [], []
        for media in medias:
            rows, columns = self.grid(frames(media)[0])
            grids.append([len(frames(media)), rows, columns])
            for frame in frames(media):
                image = frame.convert("RGB").resize((columns * patch, rows * patch))
                scaled = torch.from_numpy(np.asarray(image, dtype=np.float32) / 127.5 - 1)
                patches = scaled.view(rows, patch, columns, patch, 3).permute(0, 2, 4, 1, 3)
                pixels.append(patches.reshape(-1, 3, patch, patch))
        return BatchFeature({"pixel_values": torch.cat(pixels), "grid_thws": torch.tensor(grids)})


def frames(media: dict) -> list:
    """The pictures of an image, or of a video chunk."""
    return [media["image"]] if media["type"] == "image" else media["video_chunk"]
