"""The small models of experiments that train: layers, texts, training, and the decoder inside."""
