"""Structs of `growth_cpu.cpp`, with the same fields in the same order."""

import ctypes

from treespec_kernels.cpu.cpu_library import numbers, pointers

RULE = ("calibration", "coverage", "coverage_weight", "last_level_weight", "level_cost", "marginal_cost")
_LIMITS = ("num_ssms", "most_nodes")
_TREES = ("max_depths", "nodes", "branching", "end_tokens", "end_starts", "num_slots", "num_values", "least", "best")
_SEEDS = ("seed_children", "seed_tokens", "seed_probs", "seed_ratios")
_ROW = ("row_nodes", "row_tokens", "row_owners", "row_seeds", "row_above", "row_values")
_NEXT = ("next_nodes", "next_tokens", "next_owners", "next_seeds", "next_above", "next_values")
_LEVEL = ("tokens", "parents", "owners", "seeds", "probs", "values", "draft_probs", "proposed", "broken")


class SsmProbsStruct(ctypes.Structure):
    """An SSM's probabilities for rows of the frontier."""

    _fields_ = (*pointers("probs", "rows", "tokens"), *numbers("count", "ssm", "width"))


class GrowthStruct(ctypes.Structure):
    """Arguments and results of growing one level."""

    _fields_ = (
        *numbers(*_LIMITS),
        *pointers(*_TREES),
        *numbers("seed_width"),
        *pointers(*_SEEDS),
        *numbers("depth", "size", "children", "max_seeds", "next_width", "num_scored"),
        ("ssm_probs", ctypes.POINTER(SsmProbsStruct)),
        *pointers("weights"),
        *numbers("num_rows"),
        *pointers(*_ROW),
        *pointers(*_LEVEL),
        *numbers("num_next"),
        *pointers(*_NEXT),
    )


class PlacingStruct(ctypes.Structure):
    """Slots of the nodes of a level."""

    _fields_ = (
        *numbers("num_rows", "depth", "page_size"),
        *pointers("owners", "above", "context", "first_page", "pages", "num_slots", "row_of_slot"),
        *pointers("paths_above", "paths", "slots", "rows", "positions"),
    )


class DraftStruct(ctypes.Structure):
    """An SSM or another draft with its passes and results."""

    _fields_ = (
        *pointers("forward", "probs", "model", "head", "rotation", "cache"),
        *numbers("num_layers", "num_pages", "num_places", "hidden_bytes", "threads", "ssm", "width"),
        *pointers("tokens", "pairs", "pairing"),
        *numbers("qkv_bytes", "norm_output"),
        *pointers("features", "given"),
        *numbers("given_depths"),
        *pointers("out"),
        *numbers("num_read", "num_rows", "passes", "tree_passes"),
    )


class RuleStruct(ctypes.Structure):
    """The decision whether another level pays."""

    _fields_ = (
        *((name, ctypes.c_double) for name in RULE),
        *numbers("max_levels"),
        ("least_value", ctypes.c_float),
        *pointers("adaptive", "token_weights"),
    )


class LevelsStruct(ctypes.Structure):
    """Arguments and results of drafting all levels."""

    _fields_ = (
        *numbers("num_trees", "max_children", "reads"),
        *pointers("tokens", "first_token", "active", "valid", "first_rotations", "widths", "branching"),
        *numbers("num_levels"),
        *pointers("rows", "nodes"),
    )
