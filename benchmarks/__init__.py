"""Measurements of the operators: accuracy, and later time, on the device and on the emulator."""
