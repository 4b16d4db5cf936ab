"""The training core: losses, advantages, rollouts, guards and one engine. It knows nothing of orchestration."""
