from pronk.cli.options import given_options as given_options
from pronk.cli.options import option as option
from pronk.cli.options import panel as panel
from pronk.cli.options import shares as shares
from pronk.cli.progress import INTERRUPTED as INTERRUPTED
from pronk.cli.progress import announce as announce
from pronk.cli.progress import interruptible as interruptible
from pronk.cli.progress import status_bar as status_bar
