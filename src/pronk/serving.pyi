from pronk.engine.stats import Stats as Stats
from pronk.engine.stats import ctar_curve as ctar_curve
