"""Steps of `train_default.py`: data, tokenizer, training, distillation, evaluation, export. Not in the wheel."""
