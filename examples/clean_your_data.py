# %% [markdown]
# # Clean your own image folder
#
# Find wrong labels, and train a classifier on the other samples. This example makes a folder of
# scikit-learn's digits, with half of the training labels wrong; use your own folder instead. The
# command `lightning-bilevel clean` does the like on mini-batches, without code.
#
# Run: `python examples/clean_your_data.py`

# %%
import csv
import sys
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from matplotlib import pyplot as plt
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import to_pil_image, to_tensor

from lightning_bilevel import CertificateReport, CleaningData, DigitsCleaning, HyperCleaning
from lightning_bilevel.modules.networks import retrain

short = "--short" in sys.argv

# %% [markdown]
# ## The data
#
# Three folders, `train`, `validation` (whose labels are right) and `test`, with a folder of images
# for each class, as for torchvision's `ImageFolder`.

# %%
digits = DigitsCleaning()
digits.setup()
temporary = tempfile.TemporaryDirectory()
root = Path(temporary.name)
for name, batch in (("train", digits.lower), ("validation", digits.upper), ("test", digits.test)):
    for i, (image, label) in enumerate(zip(batch[0], batch[1].tolist(), strict=True)):
        folder = root / name / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        to_pil_image(image).save(folder / f"{i:04d}.png")

train, validation, test = (
    ImageFolder(root / name, transform=lambda image: to_tensor(image.convert("L")))
    for name in ("train", "validation", "test")
)
data = CleaningData.from_datasets(train, validation, test, epoch_length=50)
temporary.cleanup()  # all images have been read

# %% [markdown]
# ## Learn a weight for each training sample
#
# Above are the weights, judged on the validation set; below is the classifier that is trained under
# them. IVSP needs no constants: it chooses them from a few gradients. The run ends with its
# certificate.

# %%
torch.manual_seed(0)
module = HyperCleaning(n_train=len(train), inputs=64)
trainer = Trainer(
    accelerator="cpu",
    max_epochs=4 if short else 8,
    callbacks=[CertificateReport()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(module, datamodule=data)

# %% [markdown]
# ## The suspicious samples
#
# A list of all samples, the lowest weight first, and a picture of the first 32.

# %%
images, labels, _ = data.lower
predicted = module(images).argmax(1)
with Path("suspicious.csv").open("w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["image", "given_label", "predicted_label", "weight"])
    for i in module.suspicious(len(images)).tolist():
        path = Path(train.samples[i][0]).relative_to(root)
        weight = f"{float(module.weights[i]):.3g}"
        writer.writerow([path, int(labels[i]), int(predicted[i]), weight])
figure, axes = plt.subplots(4, 8, figsize=(9, 5.5), layout="constrained")
for axis, i in zip(axes.flat, module.suspicious(32).tolist(), strict=True):
    axis.imshow(images[i, 0].numpy(), cmap="gray_r")
    axis.set_title(f"{labels[i]} → {predicted[i]}", fontsize=9)
    axis.set_axis_off()
figure.suptitle("lowest weights: given label → predicted label", fontsize=10)
figure.savefig("suspicious.png", dpi=160)

# %% [markdown]
# ## Train on what is left
#
# Beside it: on everything, and on the clean validation set alone, which is the baseline to beat.

# %%
kept = module.weights > 0.25  # weights start at 0.5
clean = data.upper
sets = {
    "all noisy labels": (images, labels),
    "the clean validation set alone": clean,
    "kept samples and validation set": [
        torch.cat([noisy[kept], also]) for noisy, also in zip((images, labels), clean, strict=True)
    ],
}
errors = {}
for name, (some_images, some_labels) in sets.items():
    torch.manual_seed(0)
    classifier = retrain(module.classifier, some_images, some_labels)
    errors[name] = float((classifier(data.test[0]).argmax(1) != data.test[1]).float().mean())
    print(f"test error after training on {name}: {errors[name]:.3f}")
print(f"{int((~kept).sum())} of {len(kept)} samples lost more than half of their weight.")
