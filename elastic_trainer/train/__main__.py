"""`python -m elastic_trainer.train`."""

import sys

from elastic_trainer.train.main import main

sys.exit(main())
