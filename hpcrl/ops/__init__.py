"""Pure functions of arrays: no configuration, no device, no communicator, time axis first."""
