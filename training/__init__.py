"""The training core: losses, advantages, rollouts, guards, one engine. It knows nothing of orchestration."""
