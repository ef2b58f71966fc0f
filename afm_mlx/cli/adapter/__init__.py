"""Show, convert, check and add up adapters, of every format that their authors use."""

ACTIONS = {
    "info": "show what an adapter is",
    "convert": "write an adapter in another format",
    "verify": "look for all that keeps an adapter from being used",
    "compose": "add up adapters, each with a weight",
}
