"""After pretraining: programs run safely, answers scored."""
