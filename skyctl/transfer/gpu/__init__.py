"""The sender's half on GPUs: slots, the pipeline that fills them, and the devices they are on."""
