from pronk.moderation import CATEGORIES as CATEGORIES
from pronk.moderation import ModerationPrompt as ModerationPrompt
from pronk.tokenization.guarded import load_backend as load_backend
from pronk.tokenization.tokenizer import Tokenizer as Tokenizer
