"""Every script that `python -m experiments` runs, one line each: name -> module, or module:object.

What a script has to offer is said in `experiments.harness.Script`.
"""

SCRIPTS = {
    "gnc-depth": "experiments.conditioning.depth",
    "gnc-residual": "experiments.conditioning.residual",
    "gnc-whitening": "experiments.conditioning.whitening",
    "gnc-self-balancing": "experiments.conditioning.self_balancing",
    "gnc-leaky-relu": "experiments.conditioning.leaky_relu",
    "gnc-batch-norm": "experiments.conditioning.batch_norm",
    "gnc-convolution": "experiments.conditioning.convolution",
    "gnc-along-training": "experiments.conditioning.along_training",
    "gnc-width": "experiments.conditioning.width",
    "gnc-pruning-resnet20": "experiments.conditioning.pruning:RESNET20",
    "gnc-pruning-resnet32": "experiments.conditioning.pruning:RESNET32",
    "gnc-pruning-vgg5": "experiments.conditioning.pruning:VGG5",
    "gnc-pruning-vit": "experiments.conditioning.pruning:VIT",
    "gnc-pruning-mlp": "experiments.conditioning.pruning:MLP",
    "ours-counterexamples": "experiments.conditioning.counterexamples",
    "ours-training-time": "experiments.conditioning.training_time",
    "two-factor-theorems": "experiments.two_factor.theorems",
    "two-factor-language-model": "experiments.two_factor.language_model",
    "xgn-full-batch": "experiments.gauss_newton.optimizers:FULL_BATCH_SCRIPT",
    "xgn-mini-batch": "experiments.gauss_newton.optimizers:MINI_BATCH_SCRIPT",
}
