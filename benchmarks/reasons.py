"""Why a target is missed, by a part of the figure's name. Shown beside the figure where it is."""

REASONS: dict[str, str] = {}
