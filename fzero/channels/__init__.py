"""Messages with tensors between processes, by shared memory and sockets, that fail without killing anybody."""

from fzero.channels.address import Address as Address
from fzero.channels.connection import Connection as Connection
from fzero.channels.errors import BadMessage as BadMessage
from fzero.channels.errors import ChannelError as ChannelError
from fzero.channels.errors import Closed as Closed
from fzero.channels.errors import Refused as Refused
from fzero.channels.errors import TimedOut as TimedOut
from fzero.channels.listener import Listener as Listener
from fzero.channels.listener import connect as connect
