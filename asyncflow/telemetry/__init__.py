"""Telemetry of a run: spans, metrics, their report, fingerprints and certificates."""
