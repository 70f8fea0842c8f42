"""What all parts of vitclinic stand on: errors, configs, files, statistics, records. Private to the package."""
