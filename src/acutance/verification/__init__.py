"""Compare a model's attention with what its configuration says."""

from acutance.verification.record import Check, Finding, Verification
from acutance.verification.verify_model import verify

__all__ = ["Check", "Finding", "Verification", "verify"]
