"""Brute force for this folder: explicit Kronecker products and Jacobians, in NumPy."""

import itertools

import numpy as np


def draw(rng, widths, count=None, scale=True):
    """Gaussian weights [W_1, ..., W_L] for widths (d, ..., k), with a leading axis if counted."""
    lead = () if count is None else (count,)
    return [
        rng.standard_normal((*lead, b, a)) / (np.sqrt(a) if scale else 1.0)
        for a, b in itertools.pairwise(widths)
    ]


def covariance(rng, d, n=None):
    x = rng.standard_normal((d, n or 2 * d)) * np.geomspace(1, 0.1, d)[:, None]
    return x @ x.T / x.shape[1]


def root(sigma):
    values, vectors = np.linalg.eigh(sigma)
    return vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T


def jacobian(weights, sigma=None):
    """d vec(W_L ... W_1 R) / d (all entries of all weights), (k d, p), entry by entry."""
    d = weights[0].shape[1]
    r = np.eye(d) if sigma is None else root(sigma)
    columns = []
    for layer, weight in enumerate(weights):
        for index in np.ndindex(*weight.shape):
            unit = np.zeros_like(weight)
            unit[index] = 1.0
            product = r
            for other, matrix in enumerate(weights):
                product = (unit if other == layer else matrix) @ product
            columns.append(product.reshape(-1))
    return np.stack(columns, axis=1)


def gauss_newton(weights, sigma=None):
    """G^_O by `np.kron`, with a leading axis where the weights have one."""
    if weights[0].ndim == 3:
        return np.stack([gauss_newton([w[i] for w in weights]) for i in range(len(weights[0]))])
    d, k = weights[0].shape[1], weights[-1].shape[0]
    r = np.eye(d) if sigma is None else root(sigma)
    total = np.zeros((k * d, k * d))
    for layer in range(len(weights)):
        left, right = np.eye(k), np.eye(d)
        for matrix in weights[:layer]:
            right = matrix @ right
        for matrix in reversed(weights[layer + 1 :]):
            left = left @ matrix
        total += np.kron(left @ left.T, r @ right.T @ right @ r)
    return total


def leaky_gram(w, v, x, alpha):
    """The Gram matrix of the Jacobian of W s(V x), index sample * k + out, unit by unit."""
    k, n = w.shape[0], x.shape[1]
    total = np.zeros((n, k, n, k))
    for i in range(w.shape[1]):
        slopes = np.where(v[i] @ x >= 0, 1.0, alpha)
        outer = np.outer(slopes, slopes)[:, None, :, None]
        total += outer * (x.T @ x)[:, None, :, None] * np.outer(w[:, i], w[:, i])[None, :, None]
        total += outer * np.outer(v[i] @ x, v[i] @ x)[:, None, :, None] * np.eye(k)[None, :, None]
    return total.reshape(k * n, k * n)


def pseudo_condition(matrix, rtol=None):
    values = np.abs(np.linalg.eigvalsh(matrix))
    tolerance = (len(matrix) * 2.0**-52 if rtol is None else rtol) * values.max(-1, keepdims=True)
    return values.max(-1) / np.where(values > tolerance, values, np.inf).min(-1)
