from pronk.server.moderation import CATEGORIES as CATEGORIES
from pronk.server.moderation import ModerationPrompt as ModerationPrompt
from pronk.server.settings import read_keys as read_keys
