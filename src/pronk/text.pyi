from pronk.tokenization.tokenizer import Tokenizer as Tokenizer
