"""Where the supervisor is: the phases of the state machine, and the ten of them that are shown outside."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Where the supervisor is. `public` is the phase that status, log and service manager show."""

    PREPARING = "PREPARING"
    PLANNING = "PLANNING"
    STARTING = "STARTING"
    PROBING = "PROBING"
    READY = "READY"
    STOPPING_ENGINE = "STOPPING_ENGINE"  # an engine that failed is being killed
    DIAGNOSING = "DIAGNOSING"
    RECOVERING = "RECOVERING"
    RESTART_GRACE = "RESTART_GRACE"  # not ready any more; balancers get DRAIN_GRACE to notice
    RESTART_DRAINING = "RESTART_DRAINING"  # SIGTERM is sent, running requests end
    RESTART_KILLING = "RESTART_KILLING"
    STOP_GRACE = "STOP_GRACE"
    DRAINING = "DRAINING"
    STOP_KILLING = "STOP_KILLING"
    HOLDING = "HOLDING"  # gave up, and waits for SIGTERM (ON_GIVE_UP=hold)
    STOPPED = "STOPPED"
    GAVE_UP = "GAVE_UP"

    @property
    def public(self) -> Phase:
        """The phase of the ten that are part of the interface (`/status`, metrics, log lines)."""
        return _PUBLIC.get(self, self)


_PUBLIC = {
    Phase.DIAGNOSING: Phase.RECOVERING,
    Phase.RESTART_GRACE: Phase.STOPPING_ENGINE,
    Phase.RESTART_DRAINING: Phase.STOPPING_ENGINE,
    Phase.RESTART_KILLING: Phase.STOPPING_ENGINE,
    Phase.STOP_GRACE: Phase.DRAINING,
    Phase.STOP_KILLING: Phase.DRAINING,
    Phase.HOLDING: Phase.GAVE_UP,
}

# In the order of a life.
PUBLIC_PHASES = tuple(phase for phase in Phase if phase.public is phase)
