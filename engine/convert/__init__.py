"""Strangers' model files become ours: reading, checking, quantising, writing."""
